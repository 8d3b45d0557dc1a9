"""`graphwright generate`: tokens as they come, their figures, and errors of a target."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from graphwright.cli.generate import Generation, Timed, show
from graphwright.cli.main import main
from graphwright.generation import step_trial, step_ways

pytest.importorskip("transformers")

SOURCE = """
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast
from transformers import T5Config, T5ForConditionalGeneration

torch.manual_seed(0)
CONFIG = GPT2Config(
    vocab_size=32, n_positions=64, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
)

class Other(GPT2LMHeadModel):
    # Its own generate() does not make what its logits say.
    def generate(self, *args, **kwargs):
        if "custom_generate" not in kwargs:
            kwargs["bad_words_ids"] = [[token] for token in range(1, 31)]
        return super().generate(*args, **kwargs)

class Interrupted(GPT2LMHeadModel):
    calls = 0
    def forward(self, *args, **kwargs):
        self.calls += 1
        if self.calls == 6:
            raise KeyboardInterrupt
        return super().forward(*args, **kwargs)

def tokenizer():
    letters = "abcdefghijklmnopqrstuvwxyz ."
    vocabulary = {"<end>": 0, **{letter: 1 + n for n, letter in enumerate(letters)}}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>")

def alone():
    torch.manual_seed(0)
    return GPT2LMHeadModel(CONFIG)

def pair():
    return alone(), tokenizer()

def inputs():
    return alone(), {"input_ids": torch.tensor([[4, 5]])}

def tensors():
    return alone(), (torch.tensor([[4, 5]]), torch.tensor([[1, 1]]))

def other():
    return Other(CONFIG), tokenizer()

def interrupted():
    return Interrupted(CONFIG), tokenizer()

def strings():
    return alone(), lambda texts, **options: 1 / 0

def broken():
    made = tokenizer()
    made.eos_token = None  # So that there is nothing to pad with.
    return alone(), made

def t5():
    torch.manual_seed(0)
    config = T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
        decoder_start_token_id=0, eos_token_id=31, pad_token_id=0,
    )
    return T5ForConditionalGeneration(config), tokenizer()

def linear():
    return torch.nn.Linear(3, 3)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("generate") / "models.py"
    path.write_text(SOURCE)
    return path


def generate(source: Path, name: str, *options: object) -> Result:
    words = ["generate", f"{source}:{name}", "--device", "cpu", *map(str, options)]
    return CliRunner().invoke(main, words)


def test_one_prompt_is_compared_with_the_model_s_own(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "made.json"
    options = ("--prompt", "one tw", "--max-new-tokens", 12, "--compare", "--json", file)
    result = generate(source, "pair", *options)
    assert result.exit_code == 0, result.output
    text, *figures = result.stdout.splitlines()
    assert text.startswith("one tw")
    assert re.fullmatch(r"graphs  \d+ tokens in [\d.]+ m?s, [\d.,]+ a second, .*", figures[0])
    assert re.search(r"^ +\d+ model calls in \d+ launches? \(graphs\);", figures[1])
    assert figures[3].startswith("eager   ")
    assert figures[4].startswith("The tokens are equal; graphs are ")
    assert max(map(len, figures)) <= 80
    made = json.loads(file.read_text())
    assert made["tokens_equal"] is True
    graphs, eager = made["ways"]
    assert graphs["tokens"] == eager["tokens"]
    assert graphs["graphed"] == graphs["launches"] > 0
    assert 0 < graphs["first_s"] < graphs["seconds"]


def test_ways_to_run_a_step_are_tried_and_shown(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = step_ways.StepWay(lambda step: lambda: step())
    monkeypatch.setitem(step_ways.WAYS, step_ways.INDUCTOR, other)
    monkeypatch.setattr(step_trial, "_TIMING_S", 0.01)
    file = tmp_path / "made.json"
    options = ("--prompt", "one tw", "--max-new-tokens", 12, "--tune", "--compare", "--json", file)
    result = generate(source, "pair", *options)
    assert result.exit_code == 0, result.output
    _, heads, eager, other, *_ = result.stdout.splitlines()
    assert heads.split() == ["step", "a", "token", "read", "vs", "eager", "as", "eager"]
    assert re.fullmatch(r"eager +[\d.]+ \ws +[\d.]+ GB/s +1.00× +\d+ of \d+  (chosen|right)", eager)
    assert other.startswith("inductor ")
    assert max(map(len, result.stdout.splitlines())) <= 80
    steps = json.loads(file.read_text())["steps"]
    assert [row["strategy"] for row in steps["rows"]] == ["eager", "inductor", "inductor:gemv"]
    assert generate(source, "pair", "--prompt", "x", "--tune", "--eager").exit_code == 2


def test_several_prompts_are_a_batch_and_draws_begin_with_the_seed(
    source: Path, tmp_path: Path
) -> None:
    sampled = ("--prompt", "a", "--prompt", "some words", "--max-new-tokens", 8, "--sample")
    options = (*sampled, "--top-k", 20, "--top-p", 0.9, "--temperature", 1.5, "--eager")
    found = []
    for seed in (1, 1, 2):
        file = tmp_path / "made.json"
        result = generate(source, "pair", *options, "--seed", seed, "--json", file)
        assert result.exit_code == 0, result.output
        assert result.stdout.startswith("[1] a")
        assert "\n[2] some words" in result.stdout
        found.append(json.loads(file.read_text())["ways"][0]["tokens"])
    assert found[0] == found[1] != found[2]
    assert len(found[0]) == 2


def test_padding_before_a_shorter_prompt_changes_no_token(source: Path, tmp_path: Path) -> None:
    made = []
    for prompts in (("5", "4 7,9,2"), ("5",)):
        file = tmp_path / "made.json"
        words = [word for ids in prompts for word in ("--ids", ids)]
        options = ("--max-new-tokens", 6, "--eager", "--json", file)
        result = generate(source, "alone", *words, *options)
        assert result.exit_code == 0, result.output
        made.append(json.loads(file.read_text())["ways"][0]["tokens"])
    assert made[0][0] == made[1][0]


def test_tokens_are_printed_as_numbers_without_a_tokenizer(source: Path) -> None:
    result = generate(source, "inputs", "--max-new-tokens", 5, "--eager")
    assert result.exit_code == 0, result.output
    assert re.fullmatch(r"4 5( \d+)+ ?", result.stdout.splitlines()[0])
    several = generate(
        source, "alone", "--ids", 4, "--ids", "5,6", "--max-new-tokens", 5, "--eager"
    )
    assert re.match(r"\[1\] \d+( \d+)*\n\[2\] \d+( \d+)*\neager ", several.stdout)


def test_an_answer_is_printed_without_what_an_encoder_read(source: Path) -> None:
    options = ("--prompt", "aa", "--prompt", "bbb", "--max-new-tokens", 3, "--eager")
    result = generate(source, "t5", *options)
    assert result.exit_code == 0, result.output
    assert not result.stdout.startswith("[1] aa")


def test_other_tokens_than_the_model_s_own_are_exit_code_1(source: Path) -> None:
    options = ("--prompt", "one", "--max-new-tokens", 4, "--compare")
    result = generate(source, "other", *options)
    assert result.exit_code == 1, result.output
    assert "The tokens differ, first at token 1 of prompt 1;" in result.stdout


@pytest.mark.parametrize(
    ("name", "options", "sentence"),
    [
        ("pair", (), "There is no prompt.\nGive one with --prompt TEXT."),
        ("alone", (), "There is no prompt.\nGive one with --ids 5,17,3."),
        ("alone", ("--prompt", "x"), "TARGET gives no tokenizer for --prompt.\nReturn (model, "),
        ("pair", ("--prompt", ""), "The prompt has no tokens."),
        ("alone", ("--ids", "77"), "generate() of GPT2LMHeadModel fails: IndexError"),
        ("broken", ("--prompt", "a", "--prompt", "bc"), "The tokenizer fails: "),
        ("tensors", (), "models.py:tensors gives 2 inputs without names."),
        ("linear", ("--ids", "1"), "model is a Linear, which has no generate() of transformers"),
        ("strings", ("--ids", "1"), "returned inputs that are no tuple or dictionary."),
        ("pair", ("--ids", "1,x"), "'1,x' is no list of tokens"),
        ("pair", ("--prompt", "a", "--top-k", 3), "--top-k and --top-p are for --sample."),
        ("pair", ("--prompt", "a", "--ids", 3), "Give --prompt or --ids, and not both."),
        ("pair", ("--prompt", "a", "--eager", "--compare"), "drop --eager."),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(
    source: Path, name: str, options: tuple[object, ...], sentence: str
) -> None:
    result = generate(source, name, *options)
    assert result.exit_code == 2, result.output
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert not result.stdout


def test_ctrl_c_leaves_what_came_on_the_screen(source: Path) -> None:
    result = generate(source, "interrupted", "--prompt", "one two", "--eager")
    assert result.exit_code == 130
    assert result.stdout.startswith("one two")
    assert result.stdout.endswith("\n")
    assert result.stderr.endswith("graphwright: interrupted.\n")


def test_why_graphs_made_not_all_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    own = Generation("eager", [[1, 2, 3]], 1.0, 0.1, 0.0)
    why = "SomeProcessor looks at each token"
    made = Generation("graphs", [[1, 2]], 0.5, 0.1, 2.0, 2, 2, 1, (why,))
    show([made, own])
    printed = capsys.readouterr().out
    assert "2 model calls in 2 launches (1 of graphs); the prompt ran eagerly" in printed
    assert f"not by graphs alone: {why}" in printed
    assert "first at token 3 of prompt 1" in printed


def test_printing_takes_no_part_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

    class Slow:
        def put(self, value: torch.Tensor) -> None:
            Clock.now += 10

        def end(self) -> None:
            pass

    monkeypatch.setattr("graphwright.cli.generate.time.perf_counter", lambda: Clock.now)
    timed = Timed(Slow())
    timed.put(torch.tensor([[1, 2]]))
    for token in (3, 4):
        Clock.now += 1
        timed.put(torch.tensor([token]))
    assert timed.seconds == 2
    assert timed.tokens == [[3, 4]]
