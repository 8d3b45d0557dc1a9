"""A small language model learns the package's licence by heart, and recites it token by token.

Its generate() runs as transformers has it, and by graphs: the same text, at another speed.

    python examples/generate.py
    graphwright generate examples/generate.py:recite --prompt "Unless required" --compare
"""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import torch

LICENSE = Path(__file__).parents[1] / "LICENSE"
VOCABULARY, LENGTH, BATCH, STEPS = 512, 64, 16, 300
PROMPTS = ["Unless required", "Subject to the terms", "You may add Your own"]


def text() -> str:
    """The licence, without the spaces that its lines begin with."""
    return re.sub(r"\n +", "\n", LICENSE.read_text(encoding="utf-8"))


def tokenizer() -> Any:
    """Pairs of bytes that are frequent in the text are one token, and pairs of these again."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator([text()], trainer)
    names = ["input_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<end>", model_input_names=names
    )


def model() -> Any:
    """A Llama of 234,000 parameters, which has learnt nothing yet."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=96,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def train(learner: Any, tokens: torch.Tensor, steps: int) -> list[float]:
    """Learn to go on with the text from anywhere; the loss of every step."""
    optimizer = torch.optim.AdamW(learner.parameters(), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=4e-3, total_steps=steps, pct_start=0.1
    )
    losses = []
    for _ in range(steps):
        begins = torch.randint(len(tokens) - LENGTH, (BATCH, 1))
        rows = tokens[begins + torch.arange(LENGTH)].to(learner.device)
        loss = learner(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learner.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
    return torch.stack(losses).tolist()


def recite(steps: int = STEPS) -> tuple[Any, Any]:
    """The model when it has learnt, and its tokenizer."""
    learner, words = model(), tokenizer()
    learner.to("cuda" if torch.cuda.is_available() else "cpu")
    tokens = torch.tensor([*words(text())["input_ids"], words.eos_token_id])
    print(f"learning {len(tokens)} tokens of {LICENSE.name} in {steps} steps ...", flush=True)
    begun = time.perf_counter()
    losses = train(learner, tokens, steps)
    seconds = time.perf_counter() - begun
    print(f"loss {losses[0]:.2f}, then {losses[-1]:.2f}, after {seconds:.0f} s", flush=True)
    return learner.eval(), words


def timed(generator: Any, prompt: Any, new_tokens: int) -> tuple[list[int], float]:
    """The tokens that follow a prompt, and how many come in a second, in the best run."""
    best = 0.0
    for _ in range(3):  # The first one captures the graphs.
        begun = time.perf_counter()
        made = generator.generate(**prompt, max_new_tokens=new_tokens, do_sample=False)[0].tolist()
        rate = (len(made) - prompt["input_ids"].shape[1]) / (time.perf_counter() - begun)
        best = max(best, rate)
    return made, best


def main(steps: int = STEPS, new_tokens: int = 60) -> tuple[int, float]:
    """Learn, and recite both ways; prompts with the same tokens, and the mean of the factors."""
    import graphwright as gw

    learner, words = recite(steps)
    graphed = gw.graph_generate(learner)
    same, factors = 0, []
    for prompt in PROMPTS:
        inputs = words(prompt, return_tensors="pt").to(learner.device)
        own, own_rate = timed(learner, inputs, new_tokens)
        ours, our_rate = timed(graphed, inputs, new_tokens)
        print(f"\n{words.decode(ours, skip_special_tokens=True)}\n")
        said = "the same tokens" if ours == own else "OTHER TOKENS"
        print(f"{said}; a second: model.generate() {own_rate:.0f}, by graphs {our_rate:.0f}")
        same += ours == own
        factors.append(our_rate / own_rate)
    factor = sum(factors) / len(factors)
    print(f"\n{graphed.explain()}\n\nBy graphs it is {factor:.2f} times as fast.")
    if learner.device.type == "cpu":
        print("This is a CPU, where graphs are a list of operations: for tests, not for speed.")
        print("The gain is on a GPU, which waits for Python between two tokens.")
    return same, factor


if __name__ == "__main__":
    main()
