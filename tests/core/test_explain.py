"""Why a hit went no further: each reason, and all against a naive look at what is cached."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raykv.config import PoolConfig
from raykv.core import DEFAULT, Namespace, Sequence
from raykv.core.explain import MissReport
from raykv.core.manager import AdmitRequest
from raykv.errors import RequestError
from raykv.rank import RankKV

SIZE = 4
CAT = Namespace(multimodal=((1, b"cat"),))
DOG = Namespace(multimodal=((1, b"dog"),))


@pytest.fixture(params=[False, True], ids=["impl", "concurrent"])
def make_rank(request):
    made = []

    def make(num_blocks=40, **config):
        config = {"block_size": SIZE, "disagg_pd": request.param, **config}
        made.append(RankKV(PoolConfig(num_blocks=num_blocks, **config)))
        return made[-1]

    yield make
    for kv in made:
        kv.check_integrity()


def publish(kv, tokens, namespace=DEFAULT):
    sequence = Sequence(tokens, namespace=namespace)
    assert kv.allocate(sequence)
    sequence.kv_state.num_computed_tokens = len(tokens)
    kv.deallocate(sequence)


def admit(kv, tokens, namespace=DEFAULT, seq_id=None):
    sequence = Sequence(tokens, namespace=namespace, seq_id=seq_id)
    assert kv.allocate(sequence)
    return sequence


def ask(kv, tokens, namespace=DEFAULT):
    """Admit, explain, and take back."""
    sequence = admit(kv, tokens, namespace)
    report = kv.explain(sequence)
    assert report.num_hit_tokens == sequence.kv_state.num_computed_tokens
    kv.deallocate_without_cache(sequence)
    return report


def text(*marks):
    """Blocks of four tokens, told apart by their marks."""
    return [10 * mark + i for mark in marks for i in range(SIZE)]


# -- each reason -----------------------------------------------------------------------------------


def test_complete(make_rank):
    kv = make_rank()
    publish(kv, text(1, 2, 3))
    assert ask(kv, [*text(1, 2), 5]) == MissReport("complete", 8, 8)
    assert ask(kv, [*text(1, 2, 3), 5]) == MissReport("complete", 12, 12)
    assert ask(kv, [1, 2]) == MissReport("complete", 0, 0), "it has no full block"


def test_last_token_kept(make_rank):
    kv = make_rank()
    publish(kv, text(1, 2, 3))
    assert ask(kv, text(1, 2, 3)) == MissReport("last_token_kept", 8, 8)
    assert ask(kv, text(1, 2)) == MissReport("last_token_kept", 4, 4)
    assert ask(kv, text(1)) == MissReport("last_token_kept", 0, 0)


def test_a_last_block_that_is_not_there_is_not_kept_back(make_rank):
    kv = make_rank()
    assert ask(kv, text(1)) == MissReport("never_seen", 0, 0)
    publish(kv, text(1))
    assert ask(kv, text(1, 2)) == MissReport("never_seen", 4, 4)
    publish(kv, text(1, 3))
    assert ask(kv, text(1, 2)).reason == "diverged"


def test_not_computed_yet_names_who_computes(make_rank):
    kv = make_rank()
    publish(kv, text(1))
    leader = admit(kv, text(1, 2, 3), seq_id="leader")
    later = admit(kv, text(1, 2, 4), seq_id="later")
    assert kv.explain(later) == MissReport("not_computed_yet", 4, 4, seq_id="leader")
    assert kv.explain(leader).reason == "never_seen", "it was there before the other"
    assert ask(kv, text(1, 2, 3, 5)).seq_id == "leader", "the first of several"
    assert ask(kv, text(1, 5)).reason == "never_seen", "nobody computes that"
    kv.deallocate_without_cache(leader)
    assert ask(kv, text(1, 2, 3, 5)).seq_id == "later"


def test_who_computes_in_another_namespace_does_not_count(make_rank):
    kv = make_rank()
    admit(kv, text(1, 2), Namespace(tenant="a"))
    admit(kv, text(1, 2), CAT)
    assert ask(kv, [*text(1, 2), 9]).reason == "never_seen"
    assert ask(kv, [*text(1, 2), 9], DOG).reason == "never_seen"
    assert ask(kv, [*text(1, 2), 9], CAT).reason == "not_computed_yet"


def test_members_of_one_list_wait_for_those_before_them(make_rank):
    kv = make_rank()
    pair = [Sequence(text(1, 2), seq_id=name) for name in "ab"]
    assert kv.allocate(pair)
    assert kv.explain(pair[0]).reason == "never_seen"
    assert kv.explain(pair[1]) == MissReport("not_computed_yet", 0, 0, seq_id="a")


def test_what_was_published_since_was_not_computed_yet(make_rank):
    kv = make_rank()
    leader = admit(kv, text(1, 2, 3))
    late = admit(kv, text(1, 2, 4))
    leader.kv_state.num_computed_tokens = 12
    kv.deallocate(leader)
    assert kv.explain(late) == MissReport("not_computed_yet", 0, 0)


@pytest.mark.parametrize("marks", [(1, 2, 3), (1,)])
def test_evicted(make_rank, marks):
    kv = make_rank(num_blocks=8)
    publish(kv, [*text(*marks), 5])
    big = admit(kv, text(*range(50, 57)))  # all there is
    assert len(kv.block_manager._cache) == 0
    kv.deallocate_without_cache(big)
    assert ask(kv, [*text(*marks), 5]) == MissReport("evicted", 0, 0), "even with the whole tree"
    assert ask(kv, text(*marks)).reason == "evicted"
    assert ask(kv, [*text(*marks), 5], Namespace(tenant="a")).reason == "never_seen"
    assert ask(kv, [*text(9), 5]).reason == "never_seen"


def test_evicted_behind_what_is_left(make_rank):
    kv = make_rank(num_blocks=8)
    publish(kv, [*text(1, 2, 3, 4), 5])
    kv.deallocate_without_cache(admit(kv, text(*range(50, 55))))  # makes two of four go
    assert ask(kv, [*text(1, 2, 3, 4), 5]) == MissReport("evicted", 8, 8)
    assert ask(kv, [*text(1, 2, 3), 5]) == MissReport("evicted", 8, 8)
    assert ask(kv, text(1, 2, 6, 7)).reason == "never_seen"


def test_evicted_at_a_branch(make_rank):
    kv = make_rank(num_blocks=9)
    publish(kv, text(1, 2, 3))
    publish(kv, text(1, 2, 4))
    publish(kv, [*text(1, 2, 3), 5])  # the branch with 4 is older now
    kv.deallocate_without_cache(admit(kv, text(*range(50, 55))))
    assert ask(kv, [*text(1, 2, 4), 5]) == MissReport("evicted", 8, 8)
    assert ask(kv, [*text(1, 2, 3), 5]).reason == "complete"


def test_what_came_back_is_not_called_evicted(make_rank):
    kv = make_rank(num_blocks=8)
    publish(kv, text(1, 2))
    kv.deallocate_without_cache(admit(kv, text(*range(50, 57))))
    publish(kv, text(1, 2))
    assert ask(kv, [*text(1, 2), 5]).reason == "complete"
    assert ask(kv, [*text(1, 3), 5]).reason == "diverged"


def test_an_eviction_long_ago_is_forgotten(make_rank):
    kv = make_rank(num_blocks=8)
    publish(kv, [*text(1), 5])
    kv.deallocate_without_cache(admit(kv, text(*range(50, 57))))
    bound = kv.block_manager._cache._max_ghosts
    for index in range(bound):
        assert ask(kv, [*text(1), 5]).reason == "evicted", index
        publish(kv, [1000 + index] * SIZE)
        kv.deallocate_without_cache(admit(kv, text(*range(50, 57))))
    assert ask(kv, [*text(1), 5]).reason == "never_seen"
    assert len(kv.block_manager._cache._ghosts) == bound


def test_evicted_with_an_image(make_rank):
    kv = make_rank(num_blocks=8)
    cat = Namespace(multimodal=((5, b"cat"),))
    dog = Namespace(multimodal=((5, b"dog"),))
    publish(kv, [*text(1, 2), 5], cat)
    kv.deallocate_without_cache(admit(kv, text(*range(50, 56))))
    assert ask(kv, [*text(1, 2), 5], cat) == MissReport("evicted", 4, 4)
    assert ask(kv, [*text(1, 2), 5], dog).reason == "never_seen"


def test_diverged_within_a_run(make_rank):
    kv = make_rank()
    publish(kv, text(1, 2, 3))
    report = ask(kv, [*text(1), 20, 21, 7, 8, *text(3), 9])
    assert report == MissReport("diverged", 4, 6, (22, 23), (7, 8))
    assert ask(kv, [*text(1, 2), 99, 98, 97, 96, 0]) == MissReport(
        "diverged", 8, 8, (30, 31, 32, 33), (99, 98, 97, 96)
    ), "with nothing in common, but in the middle of a text"


def test_diverged_at_a_branch_takes_the_closest(make_rank):
    kv = make_rank()
    for tail in ([20, 21, 22, 23], [20, 99, 98, 97], [20, 21, 22, 40], [77, 78, 79, 80]):
        publish(kv, [*text(1), *tail, *text(5)])
    for prompt, position, cached in [
        ([20, 21, 22, 50], 7, {(23,), (40,)}),
        ([20, 21, 50, 51], 6, {(22, 23), (22, 40)}),
        ([20, 99, 98, 50], 7, {(97,)}),
        ([77, 50, 51, 52], 5, {(78, 79, 80)}),
    ]:
        report = ask(kv, [*text(1), *prompt, 1, 2, 3])
        assert (report.reason, report.num_hit_tokens) == ("diverged", 4)
        assert report.token_position == position
        assert report.cached_tokens in cached
        assert report.prompt_tokens == tuple(prompt[position - 4 :])


def test_a_branch_hangs_where_it_hangs(make_rank):
    """Children of another depth are no neighbours."""
    kv = make_rank()
    publish(kv, text(1, 2, 3))
    publish(kv, [*text(1, 2), 40, 41, 42, 43])
    report = ask(kv, [*text(1), 40, 41, 42, 44, 0])
    assert (report.token_position, report.cached_tokens) == (4, (20, 21, 22, 23))


def test_diverged_at_the_root_needs_something_in_common(make_rank):
    kv = make_rank()
    publish(kv, text(1, 2))
    publish(kv, text(3, 4))
    assert ask(kv, [99, *text(1, 2)]).reason == "never_seen"
    assert ask(kv, [30, 31, 7, 8, 9]) == MissReport("diverged", 0, 2, (32, 33), (7, 8))


def test_what_is_shown_of_a_large_block_is_bounded(make_rank):
    kv = make_rank(block_size=64)
    publish(kv, list(range(64)))
    report = ask(kv, [0, 1, *range(500, 563)])
    assert report.cached_tokens == tuple(range(2, 10))
    assert report.prompt_tokens == tuple(range(500, 508))


def test_other_namespace_is_named(make_rank):
    kv = make_rank()
    spaces = [
        Namespace(tenant="a"), Namespace(lora="a"), Namespace(weights_version=1)
    ]  # fmt: skip
    for index, space in enumerate(spaces):
        publish(kv, text(1 + index, 9), space)
    for index, space in enumerate(spaces):
        assert ask(kv, [*text(1 + index, 9), 5]) == MissReport(
            "other_namespace", 0, 0, namespace=space
        )
        assert ask(kv, [*text(1 + index, 9), 5], space).reason == "complete"
    publish(kv, text(1))
    assert ask(kv, [*text(1, 9), 5]) == MissReport("other_namespace", 4, 4, namespace=spaces[0])
    assert ask(kv, [*text(1, 8), 5]).reason == "never_seen", "they have no more of it either"


def test_another_namespace_with_the_same_images(make_rank):
    kv = make_rank()
    items = ((1, b"cat"), (6, b"dog"))
    publish(kv, text(1, 2), Namespace(tenant="a", multimodal=items))
    mine = Namespace(tenant="b", multimodal=items)
    report = ask(kv, [*text(1, 2), 5], mine)
    assert (report.reason, report.num_hit_tokens) == ("other_namespace", 0)
    assert report.namespace == Namespace(tenant="a", multimodal=items)
    other = Namespace(tenant="b", multimodal=((1, b"dog"), (6, b"dog")))
    assert ask(kv, [*text(1, 2), 5], other).reason == "never_seen"


def test_cache_off(make_rank):
    kv = make_rank(enable_prefix_cache=False)
    publish(kv, text(1, 2))
    assert ask(kv, [*text(1, 2), 5]) == MissReport("cache_off", 0, 0)
    assert ask(kv, text(1)) == MissReport("cache_off", 0, 0)


def test_after_a_reset_nothing_was_ever_seen(make_rank):
    kv = make_rank()
    publish(kv, text(1, 2))
    kv.reset_prefix_cache()
    assert ask(kv, [*text(1, 2), 5]).reason == "never_seen"


# -- images ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("cached", [CAT, DEFAULT])
@pytest.mark.parametrize("asked", [DOG, DEFAULT])
def test_another_image_for_the_same_tokens_diverges_where_it_begins(make_rank, cached, asked):
    kv = make_rank()
    publish(kv, text(1, 2), cached)
    report = ask(kv, [*text(1, 2), 5], asked)
    if cached == asked:
        assert report.reason == "complete"
        return
    assert report == MissReport("diverged", 0, 1, (11, 12, 13), (11, 12, 13))
    assert "image" in str(report)


def test_an_image_in_the_middle_of_a_run(make_rank):
    kv = make_rank()
    publish(kv, text(1, 2, 3), Namespace(multimodal=((6, b"cat"),)))
    dog = Namespace(multimodal=((6, b"dog"),))
    assert ask(kv, [*text(1, 2, 3), 5], dog) == MissReport("diverged", 4, 6, (22, 23), (22, 23))
    words = [*text(1), 20, 7, 8, 9, 5]  # words differ before the image does
    assert ask(kv, words, dog) == MissReport("diverged", 4, 5, (21, 22, 23), (7, 8, 9))
    later = Namespace(multimodal=((6, b"cat"), (9, b"dog")))
    assert ask(kv, [*text(1, 2, 3), 5], later) == MissReport(
        "diverged", 8, 9, (31, 32, 33), (31, 32, 33)
    )


def test_an_image_that_begins_at_the_first_token(make_rank):
    kv = make_rank()
    publish(kv, text(1, 2), Namespace(multimodal=((0, b"cat"),)))
    dog = Namespace(multimodal=((0, b"dog"),))
    assert ask(kv, [*text(1, 2), 5], dog) == MissReport("diverged", 0, 0, *[(10, 11, 12, 13)] * 2)
    assert ask(kv, text(7, 8), dog).reason == "never_seen"


# -- when it may be asked --------------------------------------------------------------------------


def test_only_who_holds_blocks_can_be_explained(make_rank):
    kv = make_rank()
    sequence = Sequence(text(1, 2))
    for _ in range(2):
        with pytest.raises(RequestError, match="holds no blocks"):
            kv.explain(sequence)
        assert kv.allocate(sequence)
        assert kv.explain(sequence).reason == "never_seen"
        kv.deallocate_without_cache(sequence)


def test_what_it_was_admitted_with_counts_not_what_was_appended(make_rank):
    kv = make_rank()
    publish(kv, text(1, 2))
    sequence = admit(kv, [*text(1), 20, 21])
    sequence.extend([22, 23, 24])
    assert kv.allocate(sequence)
    assert kv.explain(sequence) == MissReport("complete", 4, 4)


def test_a_fork_is_explained_by_whom_it_forked_from(make_rank):
    kv = make_rank()
    parent = admit(kv, [*text(1, 2), 5, 6])
    parent.kv_state.num_computed_tokens = 10
    assert kv.explain(parent.fork()) == MissReport("complete", 8, 8)
    half = admit(kv, [*text(3, 4), 5, 6], seq_id="half")
    half.kv_state.num_computed_tokens = 6
    assert kv.explain(half.fork()) == MissReport("not_computed_yet", 4, 4, seq_id="half")


def test_asking_changes_nothing(make_rank):
    kv = make_rank(num_blocks=12)
    publish(kv, text(1, 2, 3))
    publish(kv, text(1, 4))
    sequence = admit(kv, text(1, 2, 9))
    before = (
        kv.stats(),
        kv.block_manager._ledger.counts.tolist(),
        list(kv.block_manager._cache.roots),
    )
    for _ in range(3):
        assert kv.explain(sequence).reason == "diverged"
    after = (
        kv.stats(),
        kv.block_manager._ledger.counts.tolist(),
        list(kv.block_manager._cache.roots),
    )
    assert before == after


# -- as a sentence ---------------------------------------------------------------------------------

REPORTS = {
    MissReport("complete", 8, 8): "hit 8 tokens: all full blocks",
    MissReport("last_token_kept", 8, 8): (
        "hit 8 tokens: all but the last block, since one token must be computed"
    ),
    MissReport("not_computed_yet", 8, 8, seq_id="a"): (
        "hit 8 tokens: sequence 'a' was computing the next block just then"
    ),
    MissReport("not_computed_yet", 8, 8): (
        "hit 8 tokens: another sequence was computing the next block just then"
    ),
    MissReport("not_computed_yet", 8, 8, seq_id=0): (
        "hit 8 tokens: sequence 0 was computing the next block just then"
    ),
    MissReport("evicted", 8, 8): "hit 8 tokens: the next block was cached, but had to make room",
    MissReport("diverged", 8, 9, (1, 2), (3, 4)): (
        "hit 8 tokens: at token 9 the cache goes on with [1, 2], the prompt with [3, 4]"
    ),
    MissReport("diverged", 8, 9, (1, 2), (1, 4)): (
        "hit 8 tokens: at token 9 the same tokens stand for another image"
    ),
    MissReport("other_namespace", 0, 0, namespace=Namespace(tenant="{at}")): (
        "hit 0 tokens: more is cached in Namespace(tenant='{at}', lora='', weights_version=0, "
        "multimodal=()), which must not be shared"
    ),
    MissReport("never_seen", 0, 0): (
        "hit 0 tokens: what follows was never cached, or so long ago that it is forgotten"
    ),
    MissReport("cache_off", 0, 0): "hit 0 tokens: the prefix cache is switched off",
}


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: report.reason)
def test_a_report_reads_as_a_sentence(report):
    assert str(report) == REPORTS[report]


# -- against a naive look --------------------------------------------------------------------------

rows = st.one_of(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.builds(lambda n, tail: [0] * n + tail, st.integers(1, 10), st.lists(st.integers(0, 1))),
)
spaces = st.sampled_from(
    [
        *[DEFAULT] * 4,
        Namespace(tenant="a"),
        Namespace(multimodal=((3, b"cat"),)),
        Namespace(multimodal=((3, b"dog"),)),
        Namespace(tenant="a", multimodal=((3, b"cat"),)),
    ]
)


def blocks_of(tokens, namespace, size):
    """Full blocks as what must be equal to share them: tokens and images."""
    return tuple(
        (tuple(tokens[start : start + size]), namespace.items(start, start + size))
        for start in range(0, len(tokens) - size + 1, size)
    )


def prefixes(rows, size):
    """Everything cached: per namespace root all prefixes, as tuples of blocks."""
    found = {}
    for tokens, namespace in rows:
        blocks = blocks_of(tokens, namespace, size)
        known = found.setdefault(namespace.root, set())
        known.update(blocks[:count] for count in range(1, len(blocks) + 1))
    return found


def first_difference(mine, theirs, start):
    """Position in the text at which two blocks differ."""
    tokens = [
        i for i, pair in enumerate(zip(mine[0], theirs[0], strict=True)) if len(set(pair)) > 1
    ]
    images = [offset - start for offset, _ in set(mine[1]) ^ set(theirs[1])]
    return start + min(tokens + images)


def naive(cached, running, tokens, namespace, size):
    """What reports may say."""
    blocks = blocks_of(tokens, namespace, size)
    known = cached.get(namespace.root, set())
    usable = blocks[: (len(tokens) - 1) // size]
    count = next(n for n in range(len(usable), -1, -1) if n == 0 or usable[:n] in known)
    hit = count * size
    if len(blocks) == count:
        return [MissReport("complete", hit, hit)]
    following = blocks[: count + 1]
    if following in known:
        return [MissReport("last_token_kept", hit, hit)]
    for other in running:
        theirs = blocks_of(other.token_ids.tolist(), other.namespace, size)
        if other.namespace.root == namespace.root and theirs[: count + 1] == following:
            return [MissReport("not_computed_yet", hit, hit, seq_id=other.seq_id)]
    neighbours = [
        entry[count]
        for entry in known
        if len(entry) == count + 1 and entry[:count] == blocks[:count]
    ]
    nearest = [(first_difference(blocks[count], block, hit), block) for block in neighbours]
    if hit == 0 and all(block[0][0] != tokens[0] for block in neighbours):
        nearest = []
    if nearest:
        at = max(position for position, _ in nearest)
        return [
            MissReport(
                "diverged",
                hit,
                at,
                cached_tokens=block[0][at - hit :],
                prompt_tokens=blocks[count][0][at - hit :],
            )
            for position, block in nearest
            if position == at and (hit or block[0][0] == tokens[0])
        ]
    elsewhere = [
        MissReport(
            "other_namespace", hit, hit, namespace=Namespace(*root, multimodal=namespace.multimodal)
        )
        for root, theirs in cached.items()
        if root != namespace.root and following in theirs
    ]
    return elsewhere or [MissReport("never_seen", hit, hit)]


@settings(max_examples=300)
@given(
    published=st.lists(st.tuples(rows, spaces), max_size=8),
    running=st.lists(st.tuples(rows, spaces), max_size=2),
    asked=st.lists(st.tuples(rows, spaces), min_size=1, max_size=4),
    size=st.integers(1, 4),
)
def test_reports_are_what_a_naive_look_finds(published, running, asked, size):
    kv = RankKV(PoolConfig(num_blocks=300, block_size=size))
    for tokens, namespace in published:
        publish(kv, tokens, namespace)
    cached = prefixes(published, size)
    others = [admit(kv, tokens, namespace) for tokens, namespace in running]
    for tokens, namespace in asked:
        report = ask(kv, tokens, namespace)
        assert report in naive(cached, others, tokens, namespace, size)
        assert str(report).startswith(f"hit {report.num_hit_tokens} tokens: ")


def test_all_short_prompts_over_two_texts():
    """Every prompt up to length five, over one cached text of four tokens and every other."""
    texts = list(itertools.product(range(2), repeat=4))
    seen = set()
    for pair in [(texts[0], other) for other in texts[1:]]:
        kv = RankKV(PoolConfig(num_blocks=50, block_size=2))
        for tokens in pair:
            publish(kv, list(tokens))
        cached = prefixes([(tokens, DEFAULT) for tokens in pair], 2)
        for length in range(1, 6):
            for prompt in itertools.product(range(2), repeat=length):
                report = ask(kv, list(prompt))
                assert report in naive(cached, [], list(prompt), DEFAULT, 2)
                seen.add(report.reason)
    assert seen == {"complete", "last_token_kept", "diverged", "never_seen"}


def test_a_manager_without_rank_explains_too(make_manager):
    manager = make_manager(9, SIZE)
    [granted] = manager.admit([AdmitRequest(2, text(1, 2), DEFAULT)])
    assert granted.num_shared == 0
    with manager.adopt(granted.block_ids) as blocks:
        manager.cache(text(1, 2), blocks)
    assert manager.explain([*text(1, 3), 5], 1) == MissReport(
        "diverged", 4, 4, (20, 21, 22, 23), (30, 31, 32, 33)
    )
