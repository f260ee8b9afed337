"""Generate with DART in this process, without a server.

python examples/offline.py [--target FOLDER_OR_ID --drafter FOLDER_OR_ID]
"""

import argparse

import sglang as sgl

from sglang_dart.demo import prepare_models

QUESTIONS = (
    "What is the capital of France?",
    "Count from 1 to 10.",
    "Write a haiku about the sea.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="", help="default: the demo's")
    parser.add_argument("--drafter", default="", help="default: the demo's")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    options = parser.parse_args()

    target, drafter = prepare_models(model=options.target, drafter=options.drafter)
    engine = sgl.Engine(
        model_path=target,
        speculative_algorithm="DART",
        speculative_draft_model_path=drafter.source,
        max_total_tokens=20000,
    )
    try:
        tokenizer = engine.tokenizer_manager.tokenizer
        prompts = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
            )
            for question in QUESTIONS
        ]
        sampling = {"temperature": 0, "max_new_tokens": options.max_new_tokens}
        for question, answer in zip(QUESTIONS, engine.generate(prompts, sampling), strict=True):
            meta = answer["meta_info"]
            rounds = meta.get("spec_verify_ct", 0)
            print(f"{question}\n{answer['text'].strip()}")
            print(f"{meta['completion_tokens']} tokens in {rounds} rounds\n")
    finally:
        engine.shutdown()


# SGLang starts its processes by importing this file again.
if __name__ == "__main__":
    main()
