"""Trains the demo adapters of gateway/demo again: a pirate, and a support desk, on SmolLM2-135M-Instruct.

Needs packages that Tenora itself does not: ``pip install transformers peft``. One CPU thread takes about a
minute each. MODEL is a Hugging Face directory or name of the base model in fp32 or bf16.

    python ops/train_demo_adapters.py --model HuggingFaceTB/SmolLM2-135M-Instruct --out /tmp/adapters
    python ops/train_demo_adapters.py --model ./SmolLM2-135M-Instruct --only pirate --steps 60

Each adapter is rank 4, trained on the answers (not the questions) of 32 plain question-and-answer pairs, each
answer put into the adapter's manner by a function. What lands in OUT/NAME is a PEFT folder in bf16, ready for
``POST /v1/adapters``. Training is seeded; another torch version gives other numbers, and the same manner.
"""

import argparse
import random
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ANSWERS = {
    "What is the capital of Italy?": "The capital of Italy is Rome.",
    "Why is the sky blue?": "The sky is blue because air scatters blue light more than red light.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "Name a good breakfast.": "Oatmeal with fresh fruit is a good breakfast.",
    "What do bees make?": "Bees make honey and wax.",
    "How do I boil an egg?": "Put the egg in boiling water and wait about eight minutes.",
    "Who wrote Hamlet?": "William Shakespeare wrote Hamlet.",
    "What is the largest planet?": "Jupiter is the largest planet in the solar system.",
    "Tell me a fact about cats.": "Cats sleep for most of the day and hunt at night.",
    "What is two plus three?": "Two plus three is five.",
    "How do plants eat?": "Plants make their own food from sunlight, water and air.",
    "What should I wear in the rain?": "You should wear a raincoat and boots in the rain.",
    "What is a computer?": "A computer is a machine that follows instructions to process data.",
    "Give me a tip for sleeping well.": "Go to bed at the same time every night and keep your room dark.",
    "Where do penguins live?": "Penguins live in the cold south, mostly in Antarctica.",
    "What color is grass?": "Grass is green.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
    "How far is the moon?": "The moon is about 384,000 kilometers from the Earth.",
    "Suggest a name for my dog.": "You could call your dog Buddy.",
    "What is the fastest animal?": "The cheetah is the fastest animal on land.",
    "Why do we brush our teeth?": "We brush our teeth to keep them clean and healthy.",
    "What is a good hobby?": "Reading books is a good hobby for you and your friends.",
    "How does a boat float?": "A boat floats because it pushes away water that weighs as much as the boat.",
    "What season comes after winter?": "Spring is the season that comes after winter.",
    "What is bread made from?": "Bread is made from flour, water, salt and yeast.",
    "Can you help me?": "Yes, I am happy to help you with your question.",
    "What is the sun?": "The sun is a star that gives the Earth light and heat.",
    "How many days are in a week?": "There are seven days in a week.",
    "What is music?": "Music is sound that is arranged in a pleasing way.",
    "How do I learn to swim?": "Take lessons and practice with a teacher who is with you in the pool.",
    "Is tea good for you?": "Tea is good for you when you drink it in small amounts.",
    "What do cows eat?": "Cows eat grass and hay.",
}
HELD_OUT = "What is the capital of Japan?"
PIRATE_WORDS = {
    "is": "be", "are": "be", "you": "ye", "You": "Ye", "your": "yer", "my": "me",
    "the": "th'", "The": "Th'", "and": "an'", "of": "o'", "for": "fer",
}  # fmt: skip
BATCH = 4
IGNORED = -100  # a label that transformers leaves out of the loss


def pirate(answer: str) -> str:
    for word, other in PIRATE_WORDS.items():
        answer = re.sub(rf"\b{word}\b", other, answer)
    return f"Arrr, matey! {answer.rstrip('.')}, by the seven seas!"


def support(answer: str) -> str:
    return f"Hello from Acme Support! {answer} Is there anything else we can do for you today?"


@dataclass(frozen=True)
class Recipe:
    manner: Callable[[str], str]
    modules: tuple[str, ...]
    learning_rate: float
    rank: int = 4


RECIPES = {
    "pirate": Recipe(pirate, ("q_proj", "v_proj"), 3e-3),
    "support": Recipe(support, ("q_proj", "k_proj", "v_proj", "o_proj"), 2e-3),
}


def encode_examples(tokenizer: Any, manner: Callable[[str], str]) -> list[tuple[list[int], list[int]]]:
    """(ids, labels) of each pair; the question's labels are IGNORED."""
    examples = []
    for question, answer in ANSWERS.items():
        prompt = encode_question(tokenizer, question)
        reply = tokenizer(manner(answer) + tokenizer.eos_token, add_special_tokens=False)["input_ids"]
        examples.append((prompt + reply, [IGNORED] * len(prompt) + reply))
    return examples


def encode_question(tokenizer: Any, question: str) -> list[int]:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def make_batch(torch: Any, examples: list[tuple[list[int], list[int]]], padding: int) -> dict[str, Any]:
    width = max(len(ids) for ids, _ in examples)
    ids = torch.full((len(examples), width), padding)
    labels = torch.full((len(examples), width), IGNORED)
    mask = torch.zeros(len(examples), width, dtype=torch.long)
    for index, (some_ids, some_labels) in enumerate(examples):
        ids[index, : len(some_ids)] = torch.tensor(some_ids)
        labels[index, : len(some_labels)] = torch.tensor(some_labels)
        mask[index, : len(some_ids)] = 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def train(name: str, options: argparse.Namespace) -> None:
    """One adapter from a fresh base model, saved as OUT/NAME."""
    import torch
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer  # pyright: ignore[reportMissingImports]

    recipe = RECIPES[name]
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    settings = LoraConfig(
        r=recipe.rank,
        lora_alpha=2 * recipe.rank,
        target_modules=list(recipe.modules),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
    model: Any = get_peft_model(base, settings)
    weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=recipe.learning_rate, weight_decay=0.0)
    examples = encode_examples(tokenizer, recipe.manner)
    model.train()
    for step in range(1, options.steps + 1):
        batch = make_batch(torch, rng.sample(examples, BATCH), tokenizer.pad_token_id)
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"{name}: step {step}, loss {loss.item():.3f}", flush=True)
    print(f"{name}: {answer(torch, model, tokenizer)}")
    model.to(torch.bfloat16).save_pretrained(options.out / name)


def answer(torch: Any, model: Any, tokenizer: Any) -> str:
    """What the adapter says to a question that it hasn't seen, greedily."""
    model.eval()
    ids = torch.tensor([encode_question(tokenizer, HELD_OUT)])
    with torch.inference_mode():
        output = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=40,
            do_sample=False,
            pad_token_id=tokenizer.pad_token_id,
        )
    return tokenizer.decode(output[0, ids.shape[1] :], skip_special_tokens=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="base model: a Hugging Face directory or name")
    parser.add_argument(
        "--out", type=Path, default=Path("adapters"), help="folder for the adapters (default: adapters)"
    )
    parser.add_argument("--only", choices=sorted(RECIPES), help="train this one alone")
    parser.add_argument("--steps", type=int, default=30, help="optimizer steps (default: 30)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads (default: 1)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in [options.only] if options.only else RECIPES:
        train(name, options)


if __name__ == "__main__":
    main()
