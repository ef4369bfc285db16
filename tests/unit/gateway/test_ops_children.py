"""Child processes: awaited, restarted, drained, and never left behind. All of them are real."""

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from gateway.serve import valkey
from gateway.serve.children import Child, ChildFailed, Command

ROOT = Path(__file__).parents[3]
PATIENCE_S = 60.0  # for what must come, on however busy a machine
STEADY = "print('now ready', flush=True); import signal; signal.pause()"
STUBBORN = "import signal as s; s.signal(s.SIGTERM, s.SIG_IGN); print('now ready', flush=True); s.pause()"


def python(code: str, **more) -> Command:
    return Command("test", [sys.executable, "-S", "-c", code], "now ready", os.environ, **more)


async def until(check) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not check():
            await asyncio.sleep(0.01)


def test_a_killed_child_comes_back_and_its_end_is_told_once() -> None:
    async def main() -> None:
        ended: list[int] = []
        child = Child(python(STEADY), ended.append)
        child.start()
        await child.ready()
        first = child.pid
        assert first

        os.kill(first, signal.SIGKILL)
        await until(lambda: child.incarnation == 2 and child.is_ready)

        assert child.pid not in (first, None)
        assert ended == [1]
        await child.stop(PATIENCE_S)
        assert ended == [1, 2]
        assert child.pid is None

    asyncio.run(main())


def test_a_child_that_ends_before_it_is_ready_is_not_tried_again() -> None:
    async def main() -> None:
        child = Child(python("import sys; sys.exit(3)"))
        child.start()
        with pytest.raises(ChildFailed, match="exit code 3"):
            await child.ready()
        assert child.incarnation == 1
        await child.stop(1)

    asyncio.run(main())


def test_a_child_that_cannot_be_started_is_tried_again_if_it_ever_was_ready(tmp_path: Path) -> None:
    program = tmp_path / "program"
    script = f"#!{sys.executable} -S\n{STEADY}\n"

    def install() -> None:
        program.write_text(script)
        program.chmod(0o700)

    async def main() -> None:
        child = Child(Command("test", [str(program)], "now ready", os.environ))
        install()
        child.start()
        await child.ready()
        program.unlink()
        assert child.pid
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: child.incarnation > 2)

        install()
        await until(lambda: child.is_ready)
        await child.stop(PATIENCE_S)

    asyncio.run(main())


def test_a_child_that_can_never_be_started_fails_the_start() -> None:
    async def main() -> None:
        child = Child(Command("test", ["/absent/program"], "now ready", os.environ))
        child.start()
        with pytest.raises(ChildFailed, match="before it was ready"):
            await child.ready()
        await child.stop(1)

    asyncio.run(main())


def test_a_line_without_an_end_does_not_end_the_watch(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        child = Child(python(f"print('x' * 300_000, flush=True); {STEADY}"))
        child.start()
        await child.ready()
        assert child.pid
        os.kill(child.pid, signal.SIGKILL)
        await until(lambda: child.incarnation == 2 and child.is_ready)
        await child.stop(PATIENCE_S)

    asyncio.run(main())
    assert capfd.readouterr().err.count("x") >= 300_000


def test_a_child_that_ignores_the_request_to_end_is_killed() -> None:
    async def main() -> None:
        child = Child(python(STUBBORN))
        child.start()
        await child.ready()
        pid = child.pid
        await child.stop(0.05)
        assert pid
        assert not psutil.pid_exists(pid)

    asyncio.run(main())


def test_stopping_does_not_wait_for_a_restart_that_is_due() -> None:
    async def main() -> None:
        child = Child(python("print('now ready', flush=True)"))
        child.start()
        await until(lambda: child.incarnation >= 3)
        await asyncio.wait_for(child.stop(600), PATIENCE_S)

    asyncio.run(main())


def test_what_a_child_prints_is_logged_with_its_name(capfd: pytest.CaptureFixture[str]) -> None:
    async def main() -> None:
        child = Child(python("print('a line'); " + STEADY))
        child.start()
        await child.ready()
        await child.stop(PATIENCE_S)

    asyncio.run(main())
    assert "test: a line" in capfd.readouterr().err


def test_children_die_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    code = """
        import asyncio, os, sys
        from pathlib import Path
        from gateway.serve import valkey
        from gateway.serve.children import Child, Command

        async def main():
            store = Child(valkey.store_command(valkey.find_binary(), Path(sys.argv[1]), os.environ))
            other = Child(Command("other", [sys.executable, "-S", "-c", sys.argv[2]], "now ready", os.environ))
            for child in (store, other):
                child.start()
                await child.ready()
            print(store.pid, other.pid, flush=True)
            await asyncio.Event().wait()

        asyncio.run(main())
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "v.sock"), STEADY],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        assert parent.stdout
        children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
        assert len(children) == 2

        parent.kill()

        _, alive = psutil.wait_procs(children, timeout=PATIENCE_S)
        assert not alive


def test_the_embedded_store_keeps_nothing_and_evicts_nothing(tmp_path: Path) -> None:
    import redis

    async def main() -> None:
        store = Child(valkey.store_command(valkey.find_binary(), tmp_path / "v.sock", os.environ))
        store.start()
        await store.ready()
        with redis.Redis(unix_socket_path=str(tmp_path / "v.sock")) as client:
            assert client.config_get("save") == {"save": ""}
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
            assert client.config_get("port") == {"port": "0"}
        assert (tmp_path / "v.sock").stat().st_mode & 0o077 == 0
        await store.stop(PATIENCE_S)

    asyncio.run(main())
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".sock"] == []


def test_a_server_of_the_pinned_wheel_with_other_bytes_is_refused(tmp_path: Path) -> None:
    forged = tmp_path / "valkey-server"
    forged.write_bytes(b"not it")
    with pytest.raises(valkey.NoStore, match="sha256"):
        valkey.check_binary(forged, valkey.PINNED_VERSION, "0" * 64)
