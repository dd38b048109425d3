"""``lm_eval --model local-completions``, unchanged: tasks with data of their own, no network."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.conftest import CONTEXT, MODEL
from tests.helpers.server_process import ServerProcess

pytestmark = pytest.mark.real_model

CITIES = {
    "France": "Paris",
    "Italy": "Rome",
    "Germany": "Berlin",
    "Japan": "Tokyo",
    "Russia": "Moscow",
    "Egypt": "Cairo",
}
COUNTING = {"one, two, three,": "four", "1, 2, 3, 4, 5,": "6", "Monday, Tuesday, Wednesday,": "Thursday"}
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind."
MAX_BYTE_PERPLEXITY = 6.0  # chance is 256


def write_task(folder: Path, name: str, rows: list[dict], **fields: Any) -> None:
    """A task file (JSON is YAML) and its data."""
    data = folder / f"{name}.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "metadata": {"version": 1.0},
        **fields,
    }
    (folder / f"{name}.yaml").write_text(json.dumps(task))


@pytest.fixture
def tasks(tmp_path) -> Path:
    folder = tmp_path / "tasks"
    folder.mkdir()
    choices = list(CITIES.values())
    write_task(
        folder,
        "capitals",
        [{"country": country, "answer": choices.index(city)} for country, city in CITIES.items()],
        output_type="multiple_choice",
        doc_to_text="Spain: Madrid\nChina: Beijing\n{{country}}:",
        doc_to_choice=choices,
        doc_to_target="{{answer}}",
        metric_list=[{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    )
    write_task(
        folder,
        "counting",
        [{"begin": begin, "next": after} for begin, after in COUNTING.items()],
        output_type="generate_until",
        doc_to_text="{{begin}}",
        doc_to_target="{{next}}",
        generation_kwargs={"until": [",", "\n"], "max_gen_toks": 6, "do_sample": False},
        filter_list=[
            {"name": "stripped", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
        ],
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )
    write_task(
        folder,
        "prose",
        [{"text": TEXT}],
        output_type="loglikelihood_rolling",
        doc_to_text="",
        doc_to_target="{{text}}",
        metric_list=[{"metric": "byte_perplexity", "aggregation": "weighted_perplexity"}],
    )
    return folder


def evaluate(
    demo: ServerProcess, tasks: Path, names: str, environment: dict[str, str], *model_args: str
) -> tuple[dict, dict[str, list[dict]]]:
    """What the program writes: results by task, and samples by task."""
    out = tasks.parent / "out"
    arguments = [
        f"base_url={demo.url}/v1/completions",
        f"model={MODEL}",
        f"max_length={CONTEXT}",
        *model_args,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "run", "--model", "local-completions"]
        + ["--model_args", ",".join(arguments), "--tasks", names, "--include_path", str(tasks)]
        + ["--output_path", str(out), "--log_samples"],
        env=environment,
        cwd=tasks,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "API request failed" not in done.stderr, done.stderr[-4000:]
    results = json.loads(next(out.rglob("results_*.json")).read_text())["results"]
    samples = {
        name: [json.loads(line) for path in out.rglob(f"samples_{name}_*") for line in path.open()]
        for name in names.split(",")
    }
    return results, samples


def test_tokenizes_through_the_server(demo, tasks, offline):
    """With nothing but the server's address: ids come from /tokenize, special tokens from /tokenizer_info."""
    results, samples = evaluate(demo, tasks, "capitals,prose", offline)
    assert len(samples["capitals"]) == len(CITIES)
    assert 1.0 < results["prose"]["byte_perplexity,none"] < MAX_BYTE_PERPLEXITY
    check_scores(demo, samples["capitals"][0], adds_bos=False)


def test_tokenizes_by_itself(demo, tasks, offline, tokenizer_folder):
    """With a tokenizer on disk, the start token that this model wants, and requests at once."""
    results, samples = evaluate(
        demo,
        tasks,
        "capitals,counting",
        offline,
        "tokenizer_backend=huggingface",
        f"tokenizer={tokenizer_folder}",
        "add_bos_token=True",
        "num_concurrent=4",
    )
    assert results["capitals"]["acc,none"] >= 5 / 6
    assert results["counting"]["exact_match,stripped"] == 1
    assert [sample["filtered_resps"] for sample in samples["counting"]] == [
        [word] for word in COUNTING.values()
    ]
    check_scores(demo, samples["capitals"][0], adds_bos=True)


def check_scores(demo: ServerProcess, sample: dict, *, adds_bos: bool) -> None:
    """The log-probabilities that the program read off an echo are those that the server tells of a prompt."""
    for asked, (told, _) in zip(sample["arguments"].values(), sample["filtered_resps"], strict=True):
        context, whole = (
            demo.http.post("/tokenize", json={"prompt": text, "add_special_tokens": adds_bos}).json()[
                "tokens"
            ]
            for text in (asked["arg_0"], asked["arg_0"] + asked["arg_1"])
        )
        entries = demo.ask(prompt=whole, max_tokens=0, prompt_logprobs=0)["prompt_logprobs"]
        continuation = list(zip(whole, entries, strict=True))[len(context) :]
        expected = sum(entry[str(token)]["logprob"] for token, entry in continuation)
        assert float(told) == pytest.approx(expected, abs=0.02)
