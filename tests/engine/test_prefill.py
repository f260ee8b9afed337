"""What a prefill hands to the drafter."""

from types import SimpleNamespace

import torch

from sglang_dart.engine import prefill


def request(prompt, output=()):
    return SimpleNamespace(origin_input_ids=list(prompt), output_ids=list(output))


def batch(reqs, prefix, extend, ids, slots, chunked=None, following=None):
    return SimpleNamespace(
        reqs=reqs,
        prefix_lens=prefix,
        extend_lens=extend,
        input_ids=torch.tensor(ids),
        out_cache_loc=torch.tensor(slots),
        chunked_req=chunked,
        chunked_req_next_prompt_token=following,
    )


def test_rows_carry_the_following_token():
    a, b = request([1, 2, 3]), request([4, 5, 6, 7])
    step = batch([a, b], [0, 2], [3, 2], [1, 2, 3, 6, 7], [10, 11, 12, 20, 21])
    rows = prefill.prompt_rows(step, torch.zeros(5, 4), torch.tensor([90, 91]))
    assert rows.next_token.tolist() == [2, 3, 90, 7, 91]
    assert rows.position.tolist() == [0, 1, 2, 2, 3]
    assert rows.slot.tolist() == [10, 11, 12, 20, 21]
    assert prefill.last_row(step, torch.device("cpu")).tolist() == [2, 4]


def test_a_chunk_is_followed_by_the_next_prompt_token():
    a = request([1, 2, 3, 4])
    step = batch([a], [0], [2], [1, 2], [10, 11], chunked=a, following=3)
    rows = prefill.prompt_rows(step, torch.zeros(2, 4), torch.tensor([90]))
    assert rows.next_token.tolist() == [2, 3]


def test_a_chunk_of_a_retracted_request_is_followed_by_its_answer():
    a = request([1, 2], [3, 4, 5])
    step = batch([a], [1], [2], [2, 3], [11, 12], chunked=a)
    rows = prefill.prompt_rows(step, torch.zeros(2, 4), torch.tensor([90]))
    assert rows.next_token.tolist() == [3, 4]


def test_roots_inside_the_prompts_and_what_follows_them():
    a, b = request([1, 2, 3]), request([4, 5, 6, 7])
    step = batch([a, b], [0, 2], [3, 2], [1, 2, 3, 6, 7], [10, 11, 12, 20, 21])
    rows = prefill.prompt_rows(step, torch.arange(5.0)[:, None], torch.tensor([90, 91]))
    table = torch.tensor([[10, 11, 12, 0], [18, 19, 20, 21]])
    roots, following = prefill.inner_roots(step, rows, table, most=10, longest=9)
    # Token 1 has nothing before it.
    assert roots.token.tolist() == [2, 3, 6, 7]
    assert roots.length.tolist() == [1, 2, 2, 3]
    assert roots.slot_table.tolist() == table[[0, 0, 1, 1]].tolist()
    assert following.tolist() == [3, 90, 7, 91]
    few, _ = prefill.inner_roots(step, rows, table, most=3, longest=9)
    assert few.token.tolist() == [3, 6, 7]
    near, _ = prefill.inner_roots(step, rows, table, most=10, longest=2)
    assert near.token.tolist() == [2, 3, 6]
    assert near.slot_table.shape == (3, 2)


def test_a_first_token_alone_is_no_root():
    step = batch([request([5])], [0], [1], [5], [10])
    rows = prefill.prompt_rows(step, torch.zeros(1, 1), torch.tensor([90]))
    assert prefill.inner_roots(step, rows, torch.tensor([[10]]), most=4, longest=9) is None


def test_tail_ends_in_the_root():
    step = batch([request([1]), request([1, 2, 3]), request([1, 2], [8, 9])], [], [], [], [])
    tail = prefill.prompt_tail(step, torch.tensor([90, 91, 92]), 3)
    assert tail.tolist() == [[-1, 1, 90], [2, 3, 91], [8, 9, 92]]
    assert prefill.prompt_tail(step, torch.tensor([90, 91, 92]), 1).tolist() == [[90], [91], [92]]
