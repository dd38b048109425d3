"""The text benchmark on a small tokenizer; the serving benchmark's guide against its parser."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from atom.benchmarks import text_pipeline
from atom.benchmarks.benchmark_serving import REFUSED_FLAGS, make_parser
from atom.model_loader.tokenizer import Tokenizer

GUIDE = Path(__file__).parents[2].joinpath("docs/benchmarking_guide.md").read_text()


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|im_start|>"])
    return Tokenizer(backend)


def test_both_parts_are_measured_and_compared(monkeypatch, capsys):
    files = SimpleNamespace(load_tokenizer=byte_tokenizer)
    monkeypatch.setattr(text_pipeline, "ModelFiles", SimpleNamespace(resolve=lambda name: files))
    monkeypatch.setattr(text_pipeline, "CONVERSATION_CHARS", 101_000)
    assert text_pipeline.main(["--runs", "1", "--json"]) == 0
    table, figures = capsys.readouterr().out.rsplit("\n", 2)[0:2]
    figures = json.loads(figures)
    assert len(figures) == 4 == table.count("x\n") + 1
    assert all(figure["plain"] > 0 and figure["reused"] > 0 for figure in figures)
    monkeypatch.setenv("ATOM_TOKENIZE_CACHE_MB", "0")
    assert text_pipeline.main(["--runs", "1"]) == 0
    assert "ATOM_TOKENIZE_CACHE_MB is 0" in capsys.readouterr().out


def test_the_guide_names_flags_that_exist():
    flags = {option for option in make_parser()._option_string_actions if option.startswith("--")}
    named = set(re.findall(r"(--[a-z][a-z-]+)", GUIDE))
    assert named <= flags
    not_told = {"--help", "--tokenizer-mode", "--trust-remote-code", "--disable-tqdm", *REFUSED_FLAGS}
    assert flags - named - not_told == set()
