"""Which layers of a model are rounded while it loads, and to what: ``--online-quant-config``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from atom.config_parts import OnlineQuantConfig
from atom.quantization.spec import ONLINE_FORMATS, QuantSpec


class OnlineFormats:
    """The format of a layer by its name, e.g. ``model.layers.0.self_attn.qkv_proj``.

    A layer that ``exclude_layer`` names stays as it is; else the first pattern of ``layer_quant_config`` that fits
    decides, else ``global_quant_config``. An exclusion is a name, a prefix of names up to a dot, a glob or ``re:`` and
    a regular expression; a pattern is a glob, or without ``*`` any part of a name.

    Args:
        packed_modules: by the names of the checkpoint's layers, the layers that hold them: a pattern may say
            ``q_proj`` and means the product that query, key and value share.
    """

    def __init__(self, config: OnlineQuantConfig, packed_modules: Mapping[str, tuple[str, Any]]):
        self._packed = {name: packed for name, (packed, _) in packed_modules.items()}
        exclude = config.exclude_layer
        self._excludes = (exclude,) if isinstance(exclude, str) else tuple(exclude)
        self._patterns = dict(config.layer_quant_config)
        self._default = config.global_quant_config

    def format_of(self, name: str) -> QuantSpec | None:
        """What the weight of layer ``name`` is rounded to; None: it stays as it is."""
        if any(self._is_excluded_by(name, rule) for rule in self._excludes):
            return None
        for pattern, value in self._patterns.items():
            if self._fits(name, pattern):
                return ONLINE_FORMATS[value]
        return None if self._default is None else ONLINE_FORMATS[self._default]

    def rules_without(self, names: Iterable[str]) -> list[str]:
        """Exclusions and patterns that fit none of ``names``: mistyped, most likely."""
        names = list(names)
        rules = [(rule, self._is_excluded_by) for rule in self._excludes]
        rules += [(pattern, self._fits) for pattern in self._patterns]
        return [rule for rule, fits in rules if not any(fits(name, rule) for name in names)]

    def _is_excluded_by(self, name: str, rule: str) -> bool:
        if rule.startswith("re:"):
            return re.search(rule[3:], name) is not None
        rule = self._renamed(rule)
        if "*" in rule:
            return fnmatchcase(name, rule) or fnmatchcase(name, f"{rule}.*")
        return name == rule or name.startswith(f"{rule}.")

    def _fits(self, name: str, pattern: str) -> bool:
        pattern = self._renamed(pattern)
        return fnmatchcase(name, pattern) if "*" in pattern else pattern in name

    def _renamed(self, pattern: str) -> str:
        return ".".join(self._packed.get(part, part) for part in pattern.split("."))
