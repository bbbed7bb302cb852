"""What is the past of a verb? trl's SFTTrainer fine-tunes a language model, with peft's LoRA.

The base model is a small Llama of random weights, the same in every run, and the tokenizer is
trained on the text in this file, so that nothing is downloaded: `base_model` and `tokenizer` are
where `from_pretrained` goes. Judged by the loss of the answers for verbs that it has not seen.
Only the adapter is trained, kept in checkpoints and exported.
"""

import functools
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from tunediff import Choice, Metric, Range, Trial
from tunediff.integrations.transformers import fit


@dataclass(frozen=True)
class Knobs:
    rank: Annotated[int, Choice(2, 4, 8, 16)] = 8
    """Rank of the matrices that are learned."""
    alpha: Annotated[float, Range(4.0, 64.0, log=True)] = 16.0
    """What is learned is scaled by alpha / rank."""
    targets: Annotated[
        Literal["q,v", "attention", "linear"], Choice("q,v", "attention", "linear")
    ] = "q,v"
    """Which matrices get an adapter."""
    lr: Annotated[float, Range(1e-4, 3e-2, log=True)] = 1e-3
    packing: Annotated[bool, Choice(False, True)] = False
    """Several answers in one sequence: fewer filled-up places, more tokens a step."""


OBJECTIVE = Metric("eval_loss", "min", "held-out loss")
UNIT = "sequences"
BASELINE = {"loader.batch_size": 16, "loader.workers": 0}
TARGETS = {
    "q,v": ["q_proj", "v_proj"],
    "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
    "linear": "all-linear",
}


def train(trial: Trial) -> None:
    knobs = trial.knobs
    lora = LoraConfig(
        task_type="CAUSAL_LM",
        r=knobs.rank,
        lora_alpha=knobs.alpha,
        target_modules=TARGETS[knobs.targets],
    )
    args = SFTConfig(
        "out",
        learning_rate=knobs.lr,
        packing=knobs.packing,
        eval_packing=False,
        max_length=64,
        max_steps=300,
        lr_scheduler_type="cosine",
        bf16=False,
        gradient_checkpointing=False,
        per_device_eval_batch_size=64,
    )
    fit(
        trial,
        args,
        model=base_model(),
        trainer_class=SFTTrainer,
        peft_config=lora,
        processing_class=tokenizer(),
        train_dataset=questions(held_out=False),
        eval_dataset=questions(held_out=True),
    )


def base_model() -> LlamaForCausalLM:
    """The frozen model: the same in every run, whatever its seed."""
    words = tokenizer()
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
        initializer_range=0.1,
        tie_word_embeddings=True,
        pad_token_id=words.pad_token_id,
        eos_token_id=words.eos_token_id,
        bos_token_id=None,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return LlamaForCausalLM(config)


# ---------------------------------------------------------------------------------------- data
VERBS = """walk walked, ask asked, call called, open opened, clean cleaned, help helped, talk talked,
play played, stay stayed, enjoy enjoyed, carry carried, try tried, study studied, hurry hurried,
move moved, like liked, love loved, use used, close closed, dance danced, stop stopped, plan planned,
rob robbed, drop dropped, sing sang, ring rang, drink drank, swim swam, begin began, give gave,
write wrote, drive drove, ride rode, speak spoke, break broke, know knew, grow grew, throw threw,
fly flew, blow blew, bring brought, buy bought, think thought, catch caught, teach taught,
keep kept, sleep slept, feel felt, meet met, lead led, read read, run ran, come came, see saw,
look looked, wait waited, want wanted, need needed, start started, end ended, add added,
paint painted, visit visited, answer answered, listen listened, happen happened, cook cooked,
wash washed, watch watched, pass passed, miss missed, mix mixed, fix fixed, laugh laughed,
jump jumped, climb climbed, learn learned, turn turned, rain rained, snow snowed, show showed,
save saved, smile smiled, arrive arrived, decide decided, invite invited, place placed,
change changed, cry cried, marry married, worry worried, copy copied, reply replied, apply applied,
tell told, sell sold, send sent, spend spent, lend lent, build built, lose lost, win won,
find found, stand stood, sit sat, hold held, hear heard, make made, say said, pay paid, take took,
shake shook, choose chose, freeze froze, wake woke, steal stole, wear wore, eat ate, fall fell"""
QUESTIONS = (
    "What is the past of {}?",
    "Today I {}. Yesterday I",
    "They {} now, and long ago they",
    "Put into the past: we {}.",
)


def questions(*, held_out: bool) -> Dataset:
    """Prompts and completions: every fifth verb is held out."""
    pairs = [pair.split() for pair in VERBS.replace("\n", " ").split(", ")]
    rows = [
        {"prompt": question.format(verb), "completion": f" {past}"}
        for number, (verb, past) in enumerate(pairs)
        if (number % 5 == 0) == held_out
        for question in QUESTIONS
    ]
    return Dataset.from_list(rows)


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Pairs of letters and frequent words of the questions."""
    trained = Tokenizer(models.BPE(unk_token="<pad>"))
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<pad>", "<end>"]
    trainer = trainers.BpeTrainer(vocab_size=256, special_tokens=special, show_progress=False)
    trained.train_from_iterator([VERBS, *QUESTIONS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=trained, pad_token="<pad>", eos_token="<end>", bos_token=None
    )
