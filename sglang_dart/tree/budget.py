"""How wide the next tree is: what brings the most tokens a second, plain decoding included.

Both sides of the quotient are measured while serving. A tree of width w is the root and the w - 1
best nodes of any wider one, so a round tells what each narrower tree would have accepted: the
tokens that a width brings are 1 plus the share of rounds that accepted the node of rank 1, 2, ...
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import numpy.typing as npt

# Seconds of a step by requests and rows a request, as far as they are known before serving.
Prior = Callable[[int, int], float]
# Whether rounds of so many requests can have trees of this width; plain decoding, 1, always can.
Fits = Callable[[int, int], bool]

# Rounds of one request after which an observation of acceptance has lost two thirds of its weight.
MEMORY = 32
# What is assumed of a drafter before anything was seen counts as this many rounds.
PRIOR_ROUNDS = 4
# A width must promise this much more than the one in use.
GAIN = 1.02
# Rounds before a neighbour of unknown cost is tried.
EXPLORE = 24
# Rounds before something known is tried again; of plain decoding, doubled while trees do not pay.
PAUSE = 200
LONGEST_PAUSE = 1600
# Rounds of one try, and the most that a round of it may cost, in plain steps.
TRY = 4
TRY_COST = 2.0
# Round times that are remembered of a case, so few that one try renews their median.
TIMES = 7
# Round times that make a case sure.
SURE = 3


class RankAcceptance:
    """How often the node of each rank is accepted; rank 1 is the best node beside the root."""

    def __init__(self, ranks: int) -> None:
        # A guess that favours trees, so that they are tried: half a token for the best node.
        self._rate = 0.5 / np.arange(1, ranks + 1)
        self._seen = np.full(ranks, float(PRIOR_ROUNDS))

    def observe(self, rank: Sequence[npt.NDArray[np.int64]], width: int) -> None:
        """Count one round: the accepted ranks of each request, whose trees had `width` nodes."""
        known = slice(0, width - 1)
        for ranks in rank:
            hit = np.zeros(width - 1)
            hit[ranks - 1] = 1
            self._seen[known] = np.minimum(self._seen[known] + 1, MEMORY)
            self._rate[known] += (hit - self._rate[known]) / self._seen[known]

    def tokens(self, width: int) -> float:
        """Tokens that a round of this width is expected to commit, the bonus included."""
        return 1 + float(self._rate[: width - 1].sum())


class RoundCost:
    """Seconds that a round takes: what is known of the target's step, and what was seen on top."""

    def __init__(self, prior: Prior) -> None:
        self._prior = prior
        # By requests and width: attention, sampling, drafting, scheduling, and the prior's error.
        self._extra: dict[tuple[int, int], deque[float]] = {}
        # The case to judge another by, as long as no case is added or becomes sure.
        self._nearest: dict[tuple[int, int], tuple[int, int]] = {}

    def observe(self, requests: int, width: int, seconds: float) -> None:
        """Remember the time from one round to the next."""
        times = self._extra.setdefault((requests, width), deque(maxlen=TIMES))
        times.append(seconds - self._prior(requests, width))
        if len(times) in (1, SURE):
            self._nearest.clear()

    def seconds(self, requests: int, width: int) -> float:
        """What a round of this width is expected to take."""
        return max(self._prior(requests, width) + self._beside(requests, width), 1e-6)

    def sure(self, requests: int, width: int) -> bool:
        """Whether rounds of just this kind were seen."""
        return len(self._extra.get((requests, width), ())) >= SURE

    def _beside(self, requests: int, width: int) -> float:
        """The median of the nearest case, which a few slow rounds do not move."""
        if not self._extra:
            return 0.0
        asked = requests, width
        if asked not in self._nearest:
            self._nearest[asked] = self._find_nearest(*asked)
        return median(self._extra[self._nearest[asked]])

    def _find_nearest(self, requests: int, width: int) -> tuple[int, int]:
        def distance(case: tuple[int, int]) -> tuple[bool, bool, int, int]:
            others, rows = case
            # One slow round must not exclude a width for good.
            doubtful = not self.sure(*case)
            kind = (rows > 1) != (width > 1)
            return kind, doubtful, abs(others - requests), abs(rows - width)

        return min(self._extra, key=distance)


class AdaptiveWidth:
    """Chooses the rows a request, root included, of each round.

    The best width by what is known; now and then a neighbour of it, to know that one too; and while
    plain decoding is best, now and then a few trees, or a change for the better would pass unseen.
    """

    def __init__(
        self, widths: Sequence[int], prior: Prior, fits: Fits = lambda requests, width: True
    ) -> None:
        """`widths`: those that can be served, ascending from 1, as far as they fit the requests."""
        assert widths[0] == 1
        assert list(widths) == sorted(widths)
        self.widths = tuple(widths)
        self._fits = fits
        self.acceptance = RankAcceptance(max(widths[-1] - 1, 1))
        self.cost = RoundCost(prior)
        self._best = widths[-1]
        self._since_try, self._pause = 0, PAUSE
        # What is being tried, and for how many more rounds.
        self._tried, self._left = 1, 0

    @property
    def resting(self) -> bool:
        """Whether the coming round will be plain too, so that nothing need be drafted for it."""
        return self._best == 1 and not self._left and self._since_try + 1 < self._pause

    def speed(self, requests: int, width: int) -> float:
        """Expected tokens a second of one request."""
        return self.acceptance.tokens(width) / self.cost.seconds(requests, width)

    def choose(self, requests: int) -> int:
        """Give the width of the next round of this many requests."""
        widths = [w for w in self.widths if w == 1 or self._fits(requests, w)]
        self._improve(requests, widths)
        if self._left:
            self._left -= 1
            return _widest(widths, self._tried)
        self._since_try += 1
        if self._best == 1:
            if self._since_try >= self._pause:
                self._try(self._affordable(requests, widths), TRY)
                self._pause = min(2 * self._pause, LONGEST_PAUSE)
            return 1
        self._pause = PAUSE
        neighbours = self._neighbours(widths)
        unsure = [w for w in neighbours if not self.cost.sure(requests, w)]
        if self._since_try >= (EXPLORE if unsure else PAUSE):
            self._try(self._next_neighbour(unsure or neighbours), SURE)
        return self._best

    def _improve(self, requests: int, widths: Sequence[int]) -> None:
        self._best = _widest(widths, self._best)
        best = max(widths, key=lambda width: self.speed(requests, width))
        # Plain decoding is safe, all else must promise a gain.
        gain = 1.0 if best == 1 else GAIN
        if self.speed(requests, best) > gain * self.speed(requests, self._best):
            self._best = best

    def _try(self, width: int, rounds: int) -> None:
        self._tried, self._left, self._since_try = width, rounds, 0

    def _neighbours(self, widths: Sequence[int]) -> list[int]:
        at = widths.index(self._best)
        return [*widths[max(0, at - 1) : at], *widths[at + 1 : at + 2]]

    def _next_neighbour(self, neighbours: Sequence[int]) -> int:
        """The one that was not tried last."""
        return next((width for width in neighbours if width != self._tried), neighbours[0])

    def _affordable(self, requests: int, widths: Sequence[int]) -> int:
        """The widest tree that costs little more than a plain round."""
        limit = TRY_COST * self.cost.seconds(requests, 1)
        trees = [
            width
            for width in widths[1:]
            if width == widths[1] or self.cost.seconds(requests, width) <= limit
        ]
        return trees[-1] if trees else 1


def _widest(widths: Sequence[int], limit: int) -> int:
    return max(width for width in widths if width <= limit)


def ladder(ceiling: int) -> list[int]:
    """Widths worth telling apart, up to and with `ceiling`: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    steps = sorted({2**n for n in range(11)} | {3 * 2**n for n in range(10)})
    return [*steps[: bisect_left(steps, ceiling)], ceiling]


def short_ladder(ceiling: int) -> list[int]:
    """Few widths, for where each one must be captured: 1, 4, 8, 16, ..., and `ceiling`.

    On a GPU a request's 2 or 3 rows take as long as 4.
    """
    # A step just below the ceiling would hardly differ from it.
    steps = [2**n for n in range(2, 10) if 3 * 2**n <= 2 * ceiling]
    return sorted({1, *steps, ceiling})


def accepted_ranks(
    token: npt.NDArray[np.int64],
    parent: npt.NDArray[np.int32],
    score: npt.NDArray[np.float32],
    run: Sequence[int],
) -> npt.NDArray[np.int64]:
    """Ranks of the nodes on one tree's accepted path.

    token, parent, score [N] as in Tree; run: the tokens that were committed, the bonus last. Rank 1
    has the highest score, the earlier node on a tie. A run of simulated length may leave the tree,
    and then counts as far as it follows it.
    """
    rank = np.empty(len(score), dtype=np.int64)
    rank[1 + np.argsort(-score[1:], kind="stable")] = np.arange(1, len(score))
    path, node = [], 0
    for committed in run[:-1]:
        (children,) = np.nonzero((parent == node) & (token == committed))
        if not len(children):
            break
        node = int(children[0])
        path.append(rank[node])
    return np.array(path, dtype=np.int64)
