"""The Domino head against the release's outputs: states, corrected logits, chains."""

from __future__ import annotations

import pytest
import torch

from sglang_dart.score.causal import Causal
from sglang_dart.tree.grow import grow
from sglang_dart.tree.recipe import chain
from tests import dartree
from tests.draft.test_dflash import TOLERANCE, assert_close, cases_of, feed, tensor

every_case = pytest.mark.parametrize(
    ("name", "prompt"), [(name, prompt) for name in dartree.DOMINO for prompt in (0, 1)]
)


@every_case
def test_chain_states_and_logits_equal_the_release(name, prompt):
    drafter = dartree.drafter(name)
    for case in cases_of(name)[prompt]:
        roots = feed(drafter, name, case)
        head = drafter.path_head(drafter.draft(roots, 257), roots.token)
        state = head.initial_state()
        assert_close(state[0, 0], tensor(name, case, "gru_root_state"))
        states = tensor(name, case, "gru_states_slots_ge_prefix")
        expected = tensor(name, case, "chain_logits").log_softmax(-1)
        for level in range(drafter.levels):
            # Over the whole vocabulary the constant that is left open is the normaliser.
            logits = head.logits(level, state)[0, 0].log_softmax(-1)
            whole = torch.empty(257).scatter(0, head.token[0, level], logits)
            assert_close(whole, expected[level])
            token = int(whole.argmax())
            assert token == case["chain_tokens"][level + 1]
            state = head.step(state, torch.tensor([[token]]))
            if level + 1 < drafter.levels:
                assert_close(state[0, 0], states[level])


@every_case
def test_one_node_a_level_is_the_chain(name, prompt):
    drafter = dartree.drafter(name)
    for case in cases_of(name)[prompt]:
        roots = feed(drafter, name, case)
        head = drafter.path_head(drafter.draft(roots, 257), roots.token)
        ledger = grow(Causal(head), chain(drafter.levels), roots.token)
        assert ledger.token[0].tolist() == case["chain_tokens"]


def test_exempt_levels_keep_their_base_logits():
    drafter, case = dartree.drafter("domino_shift"), cases_of("domino_shift")[0][1]
    roots = feed(drafter, "domino_shift", case)
    candidates = drafter.draft(roots, 20)
    head = drafter.path_head(candidates, roots.token)
    state = head.initial_state()
    assert torch.equal(head.logits(0, state), candidates.log_prob[:, :1])
    assert (head.logits(1, state) - candidates.log_prob[:, 1:2]).abs().max() > 100 * TOLERANCE


def test_requests_and_paths_are_scored_together():
    """Three requests with frontiers of two paths give what each gives alone."""
    name = "domino_noshift"
    drafter = dartree.drafter(name)
    made = []
    for case in cases_of(name)[1]:
        roots = feed(drafter, name, case)
        made.append((drafter.draft(roots, 30), roots.token))
    token = torch.cat([candidates.token for candidates, _ in made])
    log_prob = torch.cat([candidates.log_prob for candidates, _ in made])
    carry = torch.cat([candidates.carry for candidates, _ in made])
    together = type(made[0][0])(token, log_prob, carry)
    head = drafter.path_head(together, torch.cat([root for _, root in made]))
    tokens = torch.tensor([[3, 250], [9, 9], [77, 1]])
    state = head.step(head.initial_state().expand(-1, 2, -1).contiguous(), tokens)
    logits = head.logits(3, state)
    for i, (candidates, root) in enumerate(made):
        for path in range(2):
            alone = drafter.path_head(candidates, root)
            one = alone.step(alone.initial_state(), tokens[i : i + 1, path : path + 1])
            torch.testing.assert_close(
                logits[i, path], alone.logits(3, one)[0, 0], atol=1e-5, rtol=0
            )
