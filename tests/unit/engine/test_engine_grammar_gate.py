"""Requests with a grammar through the server: compiled beside the steps, and what is said of them meanwhile waits."""

import asyncio
import threading

import pytest
from live_engine import collect, live_client, live_gateway, live_server, submit, until

from engine import wire
from engine.grammar import Compiler
from tests.tiny import tiny_tokenizer

DIGITS = 'start: "<" /[0-9]{2,6}/ ">"'


def held_to(request_id: str, grammar: str, max_tokens: int = 20) -> wire.Submit:
    return submit(request_id, sampling=wire.SamplingParams(max_tokens, seed=3, grammar=grammar), max_tokens=max_tokens)


class Hold:
    """Compiling stands still until ``release`` is set; asks nothing of time."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.release = threading.Event(), threading.Event()
        plain = Compiler.compile

        def held(compiler: Compiler, text: str):
            self.entered.set()
            assert self.release.wait(60)
            return plain(compiler, text)

        monkeypatch.setattr(Compiler, "compile", held)


def test_a_request_with_a_grammar_is_answered_in_it_and_counted(tmp_path):
    async def main():
        async with live_server(tmp_path), live_client(tmp_path) as client:
            tokens, finished = await collect(client.submit(held_to("r", DIGITS)))
            text = tiny_tokenizer().decode(tokens)
            assert (text[0], text[-1], text[1:-1].isdigit()) == ("<", ">", True)
            assert isinstance(finished, wire.Finished)
            families = {family.name: family for family in await client.stats()}
            assert families["tenora_grammar_masks"].samples[0][2] == len(tokens) - 1  # the first came compiled
            assert [value for _, _, value in families["tenora_grammar_cut"].samples] == [0.0, 0.0]

    asyncio.run(main())


def test_a_grammar_that_cannot_be_compiled_is_rejected_with_its_reason_and_leaves_no_record(tmp_path):
    async def main():
        async with live_server(tmp_path) as server, live_client(tmp_path) as client:
            _, answer = await collect(client.submit(held_to("r", "start: (")))
            assert isinstance(answer, wire.Rejected)
            assert answer.code == "invalid_grammar"
            assert answer.message
            assert server.num_open == 0
            tokens, _ = await collect(client.submit(submit("next")))
            assert len(tokens) == 8

    asyncio.run(main())


def test_whatever_goes_wrong_with_a_grammar_its_request_is_answered_and_its_id_is_free(tmp_path, monkeypatch):
    def broken(compiler: Compiler, text: str):
        raise MemoryError("no room")

    monkeypatch.setattr(Compiler, "compile", broken)

    async def main():
        async with live_server(tmp_path) as server, live_client(tmp_path) as client:
            _, answer = await collect(client.submit(held_to("r", DIGITS)))
            assert isinstance(answer, wire.Rejected)
            assert (answer.code, server.num_open) == ("invalid_grammar", 0)
            assert len((await collect(client.submit(submit("r"))))[0]) == 8

    asyncio.run(main())


def test_others_are_served_while_a_grammar_is_compiled(tmp_path, monkeypatch):
    hold = Hold(monkeypatch)

    async def main():
        async with live_server(tmp_path), live_client(tmp_path) as client:
            waiting = client.submit(held_to("r", DIGITS))
            await asyncio.to_thread(hold.entered.wait)
            tokens, _ = await collect(client.submit(submit("other")))
            assert len(tokens) == 8
            hold.release.set()
            tokens, _ = await collect(waiting)
            assert tokens

    asyncio.run(main())


def test_an_abort_and_a_close_that_come_while_a_grammar_is_compiled_are_in_force_with_its_first_step(
    tmp_path, monkeypatch
):
    hold = Hold(monkeypatch)

    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path) as (client, ledger):
            aborted = client.submit(held_to("aborted", DIGITS))
            closed = client.submit(held_to("closed", DIGITS))
            await asyncio.to_thread(hold.entered.wait)
            aborted.abort()
            closed.close(wire.Close("closed", 499))
            hold.release.set()
            tokens, finished = await collect(aborted)
            assert (tokens, finished.usage.output_tokens) == ([], 0)
            aborted.close(wire.Close("aborted", 499))
            for _ in range(2):
                _, usage = await ledger.next()
                assert (usage.outcome, usage.output_tokens) == (499, 0)
            await until(lambda: server.num_open == 0, "both are journaled")

    asyncio.run(main())


def test_a_gateway_lost_while_its_grammar_is_compiled_leaves_a_lost_record(tmp_path, monkeypatch):
    hold = Hold(monkeypatch)

    async def main():
        async with live_server(tmp_path) as server, live_gateway(tmp_path, "gateway-1") as (_, ledger):
            async with live_client(tmp_path) as client:
                client.submit(held_to("r", DIGITS))
                await asyncio.to_thread(hold.entered.wait)
            hold.release.set()
            _, usage = await ledger.next()
            assert (usage.outcome, usage.output_tokens) == (wire.OUTCOME_LOST, 0)
            await until(lambda: server.num_open == 0, "it is journaled")

    asyncio.run(main())
