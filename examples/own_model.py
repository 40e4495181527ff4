"""Decode with a model object of transformers, and with any function from ids to logits."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import dllm_bench as db

tokenizer = db.load_model("tiny-llada").text.tokenizer  # yours: AutoTokenizer.from_pretrained(...)
torch.manual_seed(0)
sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
mine = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **heads, eos_token_id=None))

model = db.wrap(mine, tokenizer, mask_token="<|mask|>", attention="full", shifted=False)
(cached,) = db.generate(model, "2 + 2 =", "fast_dllm_dual", max_new_tokens=32)
print("object:  ", len(cached.tokens), "tokens in", len(cached.trace), "forwards")


def logits(ids):  # (B, L) -> (B, L, V)
    """Anything: a network of your own, a remote call, a table."""
    return torch.nn.functional.one_hot((ids + 1) % len(tokenizer), len(tokenizer)).float()


model = db.wrap(logits, tokenizer, mask_token="<|mask|>")
(plain,) = db.generate(model, "2 + 2 =", "fast_dllm", max_new_tokens=32)
print("function:", len(plain.tokens), "tokens in", len(plain.trace), "forwards")
