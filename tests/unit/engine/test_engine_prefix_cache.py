"""Prefix reuse: what is found, what is never found."""

from arithmetic_peer import Driver, expected_scores, make_engine, submit

from engine import wire
from engine.block_pool import BlockPool
from engine.prefix_cache import PrefixCache, namespace_root
from engine.sequence import Request, Sequence

PROMPT = list(range(1, 21))  # five blocks of four


def sequence(prompt: list[int], namespace: bytes = b"n", **given) -> Sequence:
    request = Request(submit("r", prompt, cache_namespace=namespace, **given), 0)
    request.sequences = [Sequence(0, request, 0, list(prompt), 0)]
    return request.sequences[0]


def published(prompt: list[int], namespace: bytes = b"n", computed: int | None = None) -> tuple[PrefixCache, list[int]]:
    pool = BlockPool(16)
    cache = PrefixCache(pool, 4)
    owner = sequence(prompt, namespace)
    owner.block_table = pool.allocate(-(-len(prompt) // 4))
    owner.num_computed_tokens = len(prompt) if computed is None else computed
    cache.publish(owner, owner.num_computed_tokens)
    return cache, owner.block_table


def test_the_longest_common_run_of_full_blocks_is_found():
    cache, table = published(PROMPT)

    assert cache.match(sequence([*PROMPT[:11], 60, 60, 60])) == table[:2]


def test_a_match_never_covers_the_last_token():
    cache, table = published(PROMPT)

    assert cache.match(sequence(PROMPT)) == table[:4]
    assert cache.match(sequence([*PROMPT, 9])) == table


def test_only_blocks_that_are_computed_to_the_end_are_found():
    cache, table = published(PROMPT, computed=11)

    assert cache.match(sequence([*PROMPT, 9])) == table[:2]


def test_another_namespace_finds_nothing_whatever_its_tokens():
    cache, _ = published(PROMPT, b"tenant one")

    assert cache.match(sequence(PROMPT, b"tenant two")) == []


def test_a_namespace_can_not_be_shifted_into_its_neighbour():
    roots = {namespace_root(name) for name in (b"", b"\0", b"\0\0", b"org_1", b"org_12345", b"org_1\0\0\0\0")}

    assert len(roots) == 6


def test_the_same_tokens_at_another_place_are_not_found():
    cache, _ = published(PROMPT)

    assert cache.match(sequence([*PROMPT[4:], 9])) == []


def test_a_prompt_to_be_scored_is_computed_in_full():
    cache, _ = published(PROMPT)

    assert cache.match(sequence(PROMPT, prompt_logprobs=0)) == []


def test_an_evicted_block_is_never_found_again():
    pool = BlockPool(5)
    cache = PrefixCache(pool, 4)
    owner = sequence(PROMPT)
    owner.block_table, owner.num_computed_tokens = pool.allocate(5), 20
    cache.publish(owner, owner.num_computed_tokens)
    table = owner.block_table
    pool.release(table)

    pool.allocate(2)  # takes the tail

    assert cache.match(sequence([*PROMPT, 9])) == table[:3]
    cache.check_invariants()


def test_the_second_request_reports_what_it_found_and_gives_the_same_tokens():
    engine, _ = make_engine()
    driver = Driver(engine)
    driver.add(submit("cold", PROMPT, 6))
    driver.run()

    driver.add(submit("warm", PROMPT, 6))
    driver.run()

    cold, warm = driver.outcomes["cold"], driver.outcomes["warm"]
    assert cold.tokens == warm.tokens
    assert cold.finished
    assert warm.finished
    assert (cold.finished.usage.cached_tokens, warm.finished.usage.cached_tokens) == (0, 16)
    assert engine.scheduler.num_cache_hits == 16
    assert engine.scheduler.num_cache_misses == 24


def test_choices_share_the_blocks_of_their_prompt_and_count_it_once():
    engine, runner = make_engine(max_step_tokens=8)
    driver = Driver(engine)

    driver.add(submit("r", PROMPT, 3, num_choices=4, temperature=1.0, seed=3, ignore_eos=True))
    driver.run()

    outcome = driver.outcomes["r"]
    computed = sum(chunk.num_tokens for plan in runner.plans for chunk in plan.chunks)
    assert outcome.finished
    assert outcome.finished.usage.prompt_tokens == 20
    assert outcome.finished.usage.cached_tokens == 0
    assert outcome.finished.usage.output_tokens == 12
    assert len({tuple(tokens) for tokens in outcome.tokens.values()}) > 1
    assert computed == 20 + 3 * 4 + 4 * 2  # the prompt, each follower's last block, two decodes a choice
    assert engine.scheduler.pool.num_reused == 3 * 4


def test_followers_start_only_when_the_prompt_of_their_leader_is_computed():
    engine, runner = make_engine(max_step_tokens=8)
    driver = Driver(engine)
    driver.add(submit("r", PROMPT, 2, num_choices=2))

    driver.run()

    choices = [[chunk.sequence.choice for chunk in plan.chunks] for plan in runner.plans]
    assert choices[:3] == [[0], [0], [0]]
    assert 1 in choices[3]


def test_scores_are_complete_whatever_the_chunks_and_the_cache():
    engine, _ = make_engine(max_step_tokens=7)
    driver = Driver(engine)
    driver.add(submit("warms", PROMPT, 1))
    driver.run()

    driver.add(submit("scored", [PROMPT, [5]], 0, prompt_logprobs=0, num_choices=2))
    driver.run()

    outcome = driver.outcomes["scored"]
    assert outcome.scores == {0: expected_scores(PROMPT, ""), 1: ()}
    assert outcome.reasons == dict.fromkeys(range(4), "length")
    assert outcome.finished
    assert outcome.finished.usage == wire.Usage(
        prompt_tokens=21,
        cached_tokens=0,
        output_tokens=0,
        queue_ns=outcome.finished.usage.queue_ns,
        prefill_ns=outcome.finished.usage.prefill_ns,
        decode_ns=0,
        gpu_ns=outcome.finished.usage.gpu_ns,
    )
