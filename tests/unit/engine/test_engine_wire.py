"""The wire: what is encoded is decoded, however the bytes are cut; what isn't ours is a WireError."""

import contextlib
import random

import pytest

from engine import wire


def random_text(rng: random.Random) -> str:
    return "".join(rng.choice("abc-é漢\x00") for _ in range(rng.randrange(12)))


def random_logprobs(rng: random.Random) -> wire.TokenLogprobs:
    top = tuple((rng.randrange(50_000), -rng.random()) for _ in range(rng.randrange(4)))
    return wire.TokenLogprobs(rng.randrange(50_000), -rng.random() * 30, top)


def random_submit(rng: random.Random) -> wire.Submit:
    sampling = wire.SamplingParams(
        max_tokens=rng.randrange(1000),
        temperature=rng.random() * 2,
        logit_bias={rng.randrange(9): rng.uniform(-100, 100) for _ in range(rng.randrange(3))},
        seed=rng.choice([None, 0, -(2**63), 2**63 - 1]),
        stop_token_ids=tuple(rng.randrange(9) for _ in range(rng.randrange(3))),
    )
    prompts = [wire.pack_ids(rng.randrange(2**31) for _ in range(rng.randrange(40))) for _ in range(rng.randrange(4))]
    flow = wire.Flow(random_text(rng), rng.randrange(1, 9), rng.choice(["interactive", "standard", "batch"]))
    return wire.Submit(
        random_text(rng), prompts, sampling, flow, rng.randbytes(32), rng.randrange(1000), context=rng.randbytes(99)
    )


def random_to_engine(rng: random.Random) -> wire.ToEngine:
    return rng.choice(
        [
            lambda: wire.Hello(random_text(rng), rng.choice(["gateway", "observer"]), rng.randrange(9)),
            lambda: random_submit(rng),
            lambda: wire.Grant(random_text(rng), rng.randrange(1000)),
            lambda: wire.Abort(random_text(rng), rng.randrange(-1, 9)),
            lambda: wire.Close(random_text(rng), rng.randrange(600), rng.randrange(2**62), 1, 2, 3),
            lambda: wire.AdapterChunk("k", rng.randrange(2**40), 2**40, "ab" * 32, rng.randbytes(5000)),
            lambda: wire.AdapterUnavailable("k", "adapter_corrupt", random_text(rng)),
            lambda: wire.AdapterForget("k"),
            lambda: wire.Ack(rng.randrange(2**62), rng.randbytes(32)),
            lambda: wire.StatsRequest(rng.randrange(2**31)),
            lambda: wire.ResidencyRequest(rng.randrange(2**31), rng.choice([None, [], ["k"]])),
        ]
    )()


def random_to_gateway(rng: random.Random) -> wire.ToGateway:
    deltas = [
        wire.Delta(
            "r", 0, wire.pack_ids([1, 2]), tuple(random_logprobs(rng) for _ in range(rng.randrange(3))), "stop", 2
        )
        for _ in range(rng.randrange(4))
    ]
    return rng.choice(
        [
            lambda: wire.StepFrame(deltas, [wire.PromptScores("r", 0, (random_logprobs(rng),))]),
            lambda: wire.Finished(
                "r", wire.Usage(rng.randrange(2**31), 2, 3, 4, 5, 6, rng.randrange(2**62)), "internal"
            ),
            lambda: wire.Rejected("r", "busy", random_text(rng)),
            lambda: wire.AdapterWanted("k"),
            lambda: wire.ResidencyReply(1, {"k": ["device", "cpu", "disk"], "l": []}),
            lambda: wire.Record(rng.randrange(2**62), rng.randbytes(32), rng.randbytes(300)),
            lambda: wire.StatsReply(1, [wire.Family("f", "counter", "help", [("_total", {"a": "b"}, rng.random())])]),
        ]
    )()


@pytest.mark.parametrize(
    ("make", "decode"),
    [(random_to_engine, wire.decode_to_engine), (random_to_gateway, wire.decode_to_gateway)],
    ids=["to engine", "to gateway"],
)
def test_messages_survive_any_cut_of_the_byte_stream(make, decode):
    rng = random.Random(7)
    for _ in range(200):
        sent = [make(rng) for _ in range(rng.randrange(1, 6))]
        stream = b"".join(map(wire.encode, sent))
        frames, received = wire.Frames(), []
        while stream:
            cut = rng.randrange(1, len(stream) + 1)
            received += [decode(body) for body in frames.feed(stream[:cut])]
            stream = stream[cut:]
        assert received == sent


def test_token_ids_are_little_endian_int32_and_come_back():
    assert wire.pack_ids([1, 258]) == bytes([1, 0, 0, 0, 2, 1, 0, 0])
    assert wire.unpack_ids(wire.pack_ids([0, 49151, 2**31 - 1])) == [0, 49151, 2**31 - 1]
    with pytest.raises(OverflowError):
        wire.pack_ids([2**31])


def test_random_bytes_are_a_wire_error_or_nothing_yet():
    rng = random.Random(11)
    refused = 0
    for _ in range(500):
        frames = wire.Frames(max_bytes=1 << 16)
        try:
            for body in frames.feed(rng.randbytes(rng.randrange(1, 300))):
                wire.decode_to_engine(body)
        except wire.WireError:
            refused += 1
    assert refused > 400  # nearly every random length is over the bound


def test_damaged_messages_never_raise_anything_but_a_wire_error():
    rng = random.Random(13)
    for _ in range(2000):
        body = bytearray(wire.encode(random_to_engine(rng))[4:])
        for _ in range(rng.randrange(1, 4)):
            body[rng.randrange(len(body))] = rng.randrange(256)
        with contextlib.suppress(wire.WireError):
            wire.decode_to_engine(bytes(body[: rng.randrange(len(body) + 1)]))


def test_a_frame_over_the_bound_is_refused_by_its_length_alone():
    with pytest.raises(wire.WireError, match="1000 bytes"):
        list(wire.Frames(max_bytes=999).feed((1000).to_bytes(4, "big")))
