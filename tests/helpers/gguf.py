"""Greedy answers of llama.cpp and of transformers to the same prompts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

PROMPTS = (
    *(f"What is {a} + {b}?" for a, b in ((2, 3), (12, 30), (47, 8), (100, 250), (7, 77))),
    "What is the capital of France?",
    "Name three colours.",
    "Write one sentence about the sea.",
    "Who wrote Hamlet?",
    "Translate 'good morning' into French.",
    "Why is the sky blue?",
    "List the days of the week.",
    "What does 'don't' stand for?",
    "Give me a word that rhymes with cat.",
    "How many legs has a spider?",
    "Is 17 a prime number?",
    "Write a line of Python that prints 'hello'.",
    "What comes after 1, 2, 4, 8?",
    "Name an animal that can fly.",
    "Café, naïve, 東京: what are these words?",
)


def by_llama_cpp(file: Path, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """Greedy tokens of llama.cpp, without the end."""
    from llama_cpp import GGML_TYPE_F32, Llama

    # Keys and values in float32: in float16, its default, two tokens that are as likely can change
    # places.
    exact = {"type_k": GGML_TYPE_F32, "type_v": GGML_TYPE_F32, "n_threads_batch": 1}
    model = Llama(str(file), n_ctx=512, n_threads=1, verbose=False, seed=0, **exact)
    found = []
    for prompt in prompts:
        model.reset()
        tokens = []
        for token in model.generate(list(prompt), temp=0.0, repeat_penalty=1.0):
            if token == model.token_eos() or len(tokens) == count:
                break
            tokens.append(token)
        found.append(tokens)
    return found


def tokens_of_llama_cpp(file: Path, texts: Sequence[str]) -> list[list[int]]:
    """How llama.cpp splits texts, special tokens read as such."""
    from llama_cpp import Llama

    model = Llama(str(file), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]


def behind_the_likeliest(
    folder: Path, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
) -> list[float]:
    """How far, in logits, a token of each answer is behind what transformers finds likeliest.

    In float32, the largest of each answer; 0 where transformers' own greedy answer is the same. One
    pass for each answer instead of one for each token.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, trust_remote_code=False
    )
    found = []
    for prompt, answer in zip(prompts, answers, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        found.append(float((logits.max(dim=-1).values - chosen).max()))
    return found
