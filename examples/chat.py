"""Ask a server through the OpenAI API, and see how many tokens each round committed.

Start one with examples/serve_dart.sh, then: python examples/chat.py "Why is the sky blue?"
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default="What is the capital of France?")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--max-tokens", type=int, default=128)
    options = parser.parse_args()

    client = OpenAI(base_url=f"{options.url}/v1", api_key="none")
    stream = client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": options.question}],
        temperature=0,
        max_tokens=options.max_tokens,
        stream=True,
        # SGLang's own field: figures of speculation at the end of the stream.
        extra_body={"return_spec_tokens_details": True},
    )
    figures = {}
    for chunk in stream:
        for choice in chunk.choices:
            print(choice.delta.content or "", end="", flush=True)
        figures |= (chunk.model_extra or {}).get("sglext") or {}
    print()
    details = figures.get("spec_tokens_details")
    if details:
        rounds = details["spec_verify_ct"]
        drafts = details["spec_num_correct_drafts"]
        print(f"accept length {1 + drafts / rounds:.2f} over {rounds} rounds")


if __name__ == "__main__":
    main()
