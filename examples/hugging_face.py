"""Hugging Face models on fastformer's attention: BERT forward and backward, Llama generating.

    python examples/hugging_face.py

The models are small and randomly initialised: nothing is downloaded. With a checkpoint it is
AutoModel.from_pretrained(name, attn_implementation="fastformer").
"""

import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import fastformer as ff

ff.register_transformers()
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
sizes |= {"num_attention_heads": 4, "initializer_range": 0.2, "pad_token_id": 0}
tokens = torch.randint(4, 100, (3, 20), device=device)
real = torch.arange(20, device=device) < torch.tensor([[20], [13], [7]], device=device)

# BERT, with padding on the right: the same logits and gradients as transformers' eager attention.
bert = BertForMaskedLM(BertConfig(**sizes)).to(device).eval()
results = {}
for name in ("eager", "fastformer"):
    bert.set_attn_implementation(name)
    bert.zero_grad()
    labels = tokens.masked_fill(~real, -100)
    output = bert(tokens, attention_mask=real.long(), labels=labels)
    output.loss.backward()
    gradients = torch.cat([p.grad.flatten() for p in bert.parameters() if p.grad is not None])
    results[name] = output.logits[real].detach(), gradients
for what, have, want in zip(("logits", "gradients"), results["fastformer"], results["eager"]):
    difference = ((have - want).abs().max() / want.abs().max()).item()
    print(f"BERT, {what}: largest difference {difference:.1e} of the largest value")
    assert difference < 1e-4

# Llama, with grouped heads, padding on the left and a KV cache: the same tokens.
llama = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).to(device).eval()
prompt = {"input_ids": tokens, "attention_mask": real.flip(1).long()}
texts = {}
for name in ("eager", "fastformer"):
    llama.set_attn_implementation(name)
    texts[name] = llama.generate(**prompt, max_new_tokens=20, do_sample=False)
same = torch.equal(texts["fastformer"], texts["eager"])
print(f"Llama, {texts['eager'].numel() - tokens.numel()} generated tokens: same = {same}")
assert same

# Which layers of it ran on fastformer, and on which backend.
print(ff.explain(llama, tokens))
