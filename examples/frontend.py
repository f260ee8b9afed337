"""An SGLang program on a server that speculates: a fork of three answers, then a constrained one.

Start a server with examples/serve_dart.sh, then: python examples/frontend.py
"""

import argparse

import sglang as sgl


@sgl.function
def compare(s, first: str, second: str):
    s += sgl.system("You answer in one short sentence.")
    s += sgl.user(f"I want to compare {first} and {second}.")
    s += sgl.assistant("Ask away.")
    # Branches share the conversation so far, and are answered side by side.
    branches = s.fork(3)
    for branch, aspect in zip(branches, ("price", "comfort", "speed"), strict=True):
        branch += sgl.user(f"Compare their {aspect}.")
        branch += sgl.assistant(sgl.gen("answer", max_tokens=32, temperature=0))
    for branch in branches:
        s += sgl.user("Note: " + branch["answer"])
        s += sgl.assistant("Noted.")
    s += sgl.user("How many points out of 10 does the first one get?")
    s += sgl.assistant(sgl.gen("points", regex=r"([0-9]|10)/10", max_tokens=8, temperature=0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("first", nargs="?", default="a train")
    parser.add_argument("second", nargs="?", default="a plane")
    options = parser.parse_args()

    sgl.set_default_backend(sgl.RuntimeEndpoint(options.url))
    state = compare.run(first=options.first, second=options.second)
    for message in state.messages():
        print(f"{message['role']}: {message['content']}")
    print(f"points: {state['points']}")


if __name__ == "__main__":
    main()
