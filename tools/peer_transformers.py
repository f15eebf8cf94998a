#!/usr/bin/env python3
"""Sampling speed of transformers' `generate` on a Qwen3-8B-shaped model of random BF16 weights.

Needs a CUDA device, torch and transformers. Prints output tokens per second of the whole call,
prefill included, and the ratio of octet's figures to it, given as --ours NAME=TOK_S …
"""
import argparse
import time

import torch
import transformers


def make_model(layers: int) -> torch.nn.Module:
    config = transformers.Qwen3Config(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40960,
        rope_theta=1e6,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    # Made on the device, so that no gigabytes travel.
    with torch.device("cuda"):
        return transformers.Qwen3ForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--ours", nargs="*", default=[], help="NAME=TOK_S of octet in the same call")
    arguments = parser.parse_args()

    model = make_model(arguments.layers)
    prompts = torch.randint(0, 151936, (arguments.batch, arguments.prompt_tokens), device="cuda")

    def generate(new_tokens: int) -> float:
        torch.cuda.synchronize()
        begin = time.perf_counter()
        # Without an end token every sequence runs its full length.
        options = transformers.GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=new_tokens,
            eos_token_id=None,
            pad_token_id=0,
            use_cache=True,
            cache_implementation="static" if arguments.cache == "static" else None,
        )
        with torch.inference_mode():
            out = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), generation_config=options
            )
        torch.cuda.synchronize()
        assert out.shape == (arguments.batch, arguments.prompt_tokens + new_tokens), out.shape
        return time.perf_counter() - begin

    generate(4)  # the device wakes up
    seconds = generate(arguments.new_tokens)
    rate = arguments.batch * arguments.new_tokens / seconds
    line = (
        f"transformers {transformers.__version__} generate, BF16, {arguments.layers} layers, "
        f"{arguments.cache} cache: {arguments.batch} x ({arguments.prompt_tokens} + "
        f"{arguments.new_tokens}): {seconds:.2f} s, {rate:.0f} output tok/s"
    )
    print(line)
    for name, ours in (pair.split("=") for pair in arguments.ours):
        print(f"  octet {name}: {float(ours):.0f} output tok/s, {float(ours) / rate:.2f} times that")


if __name__ == "__main__":
    main()
