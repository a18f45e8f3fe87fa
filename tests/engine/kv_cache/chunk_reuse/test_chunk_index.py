"""Chunks found at other places, on a device that checks each token of K/V that it reads."""

from __future__ import annotations

import pytest

from engine.config import ChunkReuseConfig, EngineConfig
from engine.core import messages as m
from engine.core.engine_core import EngineCore
from engine.core.step import Step
from engine.errors import InvalidParameter
from engine.kv_cache.block_pool import BlockPool
from engine.multimodal.image_input import FIRST_IMAGE_ID
from engine.params import GREEDY, MAX_CHUNKS, Span, check_chunks
from tests.engine.fake import FakeRunner, Letters, next_token

HEAD, SIZE = 2, 4
A, B, C = (
    [1, 2, 2, 1, 1, 3, 2, 1, 3, 3, 1, 2],
    [2, 3, 1, 1, 2, 2, 3, 3, 1, 2, 3, 1],
    [3, 3, 2, 1, 3, 2, 2, 2, 1, 1, 3, 1],
)
SYSTEM, ASKED = [1, 3, 1], [2, 2, 3, 1, 1]


class Served:
    """A core, and what its steps ran."""

    def __init__(self, *, blocks: int = 60, head: int | None = HEAD, budget: int = 64) -> None:
        reuse = None if head is None else ChunkReuseConfig(recompute_tokens=head)
        config = EngineConfig("fake", block_size=SIZE, max_batch_tokens=budget, loop="plain", chunk_reuse=reuse)
        self.pool = BlockPool(blocks)
        self.moves: list[int] = []
        runner, moves = FakeRunner(self.pool, SIZE), self.moves
        run = runner.run

        def counted(step: Step):  # type: ignore[no-untyped-def]
            moves.extend(row.move.end - row.move.start for row in step.rows if row.move is not None)
            return run(step)

        runner.run = counted  # type: ignore[method-assign]
        self.runner = runner
        self.core = EngineCore(config, runner, self.pool, Letters, (0,), b"secret", lambda: 0.0)
        self.id = 0

    def ask(
        self, parts: list[list[int]], *, tenant: str = "", named: bool = True, prompt_logprobs: bool = False,
        close: bool = True, count: int = 6, system: list[int] = SYSTEM,
    ) -> int:  # fmt: skip
        """Asks about `parts`; returns the tokens that were computed for it before the first one it wrote."""
        tokens, spans = list(system), []
        for part in parts:
            spans.append((len(tokens), len(tokens) + len(part)))
            tokens += part
        tokens += ASKED
        before = len(self.runner.batches)
        self.id += 2
        sequence = self.id
        self.core.handle(m.Open(sequence, tuple(tokens), tenant, 0, None, chunks=tuple(spans) if named else ()))
        span = Span(GREEDY, max_tokens=count, prompt_logprobs=0 if prompt_logprobs else None)
        self.core.handle(m.Generate(sequence, sequence + 1, span, 0, count))
        written: list[int] = []
        for _ in range(200):
            if not self.core.has_work:
                break
            self.core.step()
            self.core.check()
            for reply in self.core.take_replies():
                if isinstance(reply, m.OutputPiece):
                    written += reply.output.token_ids
        known = list(tokens)
        for token in written:
            assert token == next_token(known)
            known.append(token)
        assert written
        if close:
            self.core.handle(m.Close(sequence))
            self.core.check()
        computed = sum(n for batch in self.runner.batches[before:] for _, n in batch)
        return computed - (len(written) - 1)

    @property
    def hits(self) -> int:
        return self.core.stats().chunk_hit_tokens


def test_a_chunk_is_copied_to_another_place() -> None:
    served = Served()
    whole = served.ask([A, B])
    assert served.moves == [] and whole == len(SYSTEM) + 24 + len(ASKED)
    again = served.ask([B, A])
    assert len(served.moves) == 2 and served.hits == sum(served.moves)
    # of each chunk all but the first tokens and those of the block in which it ends
    assert all(12 - HEAD - SIZE < moved <= 12 - HEAD for moved in served.moves)
    assert again == whole - sum(served.moves)


def test_a_chunk_is_copied_behind_text_that_nobody_saw() -> None:
    served = Served()
    served.ask([A, B])
    served.ask([C, B])
    assert len(served.moves) == 1
    served.ask([B, C])
    assert len(served.moves) == 3


@pytest.mark.parametrize("budget", [1, 3, 7, 64])
def test_copies_do_not_depend_on_chunked_prefill(budget: int) -> None:
    served = Served(budget=budget)
    served.ask([A, B, C])
    served.ask([C, A, B])
    assert len(served.moves) == 3


def test_users_have_chunks_of_their_own() -> None:
    served = Served()
    served.ask([A, B], tenant="ann")
    served.ask([B, A], tenant="bob")
    assert served.moves == []
    served.ask([B, A], tenant="ann")
    assert len(served.moves) == 2


def test_chunks_that_are_not_named_are_computed() -> None:
    served = Served()
    served.ask([A, B])
    served.ask([B, A], named=False)
    assert served.moves == []


def test_nothing_is_copied_while_reuse_is_off() -> None:
    served = Served(head=None)
    served.ask([A, B])
    assert served.ask([B, A]) >= 24 and served.moves == []


def test_approximate_prefixes_are_found_by_the_same_chunks_alone() -> None:
    served = Served()
    served.ask([A, B])
    served.ask([B, A])
    copied = len(served.moves)
    whole = len(SYSTEM) + 24 + len(ASKED)
    assert served.ask([B, A]) < SIZE + 1 and len(served.moves) == copied  # a prefix hit, as of any prompt
    assert served.ask([B, A], named=False) == whole  # exact: not even a block of it was found
    assert served.ask([B, A], named=False) < SIZE + 1


def test_exact_prefixes_are_found_before_the_first_chunk_alone() -> None:
    served = Served()
    served.ask([A, B], named=False)
    assert served.ask([A, B]) == len(SYSTEM) + 24 + len(ASKED)


def test_positions_whose_logits_are_wanted_are_computed() -> None:
    served = Served()
    served.ask([A, B])
    assert served.ask([B, A], prompt_logprobs=True) == len(SYSTEM) + 24 + len(ASKED)
    assert served.moves == []


def test_evicted_chunks_are_computed() -> None:
    served = Served(blocks=16)
    served.ask([A, B])
    for each in range(1, 4):
        served.ask([[each, 1, each, 2, 2, each, 3, 1, 2, each, each, 1]] * 2, named=False)
    served.ask([B, A])
    assert served.moves == []


def test_a_copy_needs_blocks_for_the_whole_prompt() -> None:
    served = Served(blocks=9)  # a prompt and its answer, without the blocks that would be read
    for system in (SYSTEM, [3, 3, 2], [2, 1, 2]):
        served.ask([A + B], count=2, system=system)  # it ends, as no sequence waits for blocks that it holds itself
    assert served.moves == []
    served = Served(blocks=20)
    for system in (SYSTEM, [3, 3, 2], [2, 1, 2]):
        served.ask([A + B], count=2, system=system)
    assert len(served.moves) == 2


def test_forks_and_cuts_keep_the_mark() -> None:
    served = Served()
    served.ask([A, B])
    served.ask([B, A], close=False)
    seq = served.core._sequences[served.id]
    first = seq.chunks[0][0]
    assert seq.approximate_from == first == len(SYSTEM)
    served.core.handle(m.Fork(served.id, (900,), served.id))
    child = served.core._sequences[900]
    assert (child.chunks, child.approximate_from) == (seq.chunks, first)
    served.core.handle(m.Truncate(served.id, first + 5))
    assert seq.chunks == () and seq.approximate_from == first  # its first chunk is cut, and its K/V still a copy
    served.core.handle(m.Truncate(served.id, first))
    assert seq.approximate_from is None
    served.core.check()


def test_short_chunks_and_images_are_left_out() -> None:
    served = Served()
    for tokens in (A[:7], [*A[:6], FIRST_IMAGE_ID, *A[6:]]):
        served.core.handle(m.Open(100, (*SYSTEM, *tokens), "", 0, None, chunks=((3, 3 + len(tokens)),)))
        assert served.core._sequences[100].chunks == ()
        assert served.core._sequences[100].approximate_from is None
        served.core.handle(m.Close(100))


def test_spans_are_checked() -> None:
    assert check_chunks([(6, 9), (2, 6)], 9, reuses=True) == ((2, 6), (6, 9))
    assert check_chunks([], 0, reuses=True) == ()
    for spans in ([(3, 3)], [(5, 4)], [(-1, 2)], [(0, 10)], [(0, 5), (4, 8)]):
        with pytest.raises(InvalidParameter, match="chunks is .* accepted: spans within"):
            check_chunks(spans, 9, reuses=True)
    with pytest.raises(InvalidParameter, match="accepted: at most 256"):
        check_chunks([(at, at + 1) for at in range(MAX_CHUNKS + 1)], 1000, reuses=True)
    with pytest.raises(InvalidParameter, match="1 spans.*chunk_reuse is not set"):
        check_chunks([(2, 6)], 9, reuses=False)
    assert check_chunks([], 9, reuses=False) == ()


@pytest.mark.parametrize(
    "field", [{"recompute_tokens": 0}, {"max_kl": 0}, {"min_agreement": 1.5}], ids=lambda each: next(iter(each))
)
def test_limits_are_checked(field: dict[str, float]) -> None:
    with pytest.raises(InvalidParameter, match=f"{next(iter(field))} is .*accepted"):
        ChunkReuseConfig(**field)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "beside",
    [{"prefix_cache": False}, {"deterministic": True}, {"kv_dtype": "int8"}, {"kv_dtype": "int4"},
     {"tensor_parallel_size": 2}],
    ids=str,
)  # fmt: skip
def test_refused_beside(beside: dict[str, object]) -> None:
    with pytest.raises(InvalidParameter, match="chunk_reuse is set and .* accepted"):
        EngineConfig("fake", chunk_reuse=ChunkReuseConfig(), **beside)  # type: ignore[arg-type]
