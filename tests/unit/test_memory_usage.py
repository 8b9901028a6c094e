"""What processes take at most is seen, also after they have given it back, and shared pages once.

Asked of fresh interpreters, which have not taken anything before.
"""

import subprocess
import sys
import textwrap

MIB = 1 << 20


def measured(code: str) -> int:
    """Bytes that a process says it has taken at most, with all that it has started."""
    prologue = (
        "import mmap, os, subprocess, sys\nfrom lockstep.comm.shared_memory.memory_usage import *\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", prologue + textwrap.dedent(code) + "\nprint(peak_memory())"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return int(done.stdout.splitlines()[-1])


def test_what_is_given_back_counts() -> None:
    more = measured(
        "block = mmap.mmap(-1, 256 << 20); block.write(bytes(256 << 20)); block.close()"
    )
    assert 400 * MIB > more - measured("") > 250 * MIB


CHILD = """
block = mmap.mmap(-1, 256 << 20, {flags})
block.write(b"1" * (256 << 20))
reader, writer = os.pipe()
done, finish = os.pipe()
if os.fork() == 0:
    os.close(finish)
    {act}
    os.write(writer, b"1")
    os.read(done, 1)  # until the other end is closed
    os._exit(0)
os.read(reader, 1)
print(len(family(os.getpid())))
"""


def test_what_processes_share_counts_once() -> None:
    # 256 MiB of bytes to write, and the block.
    act = "sum(block[::4096])"
    shared = measured(CHILD.format(flags="mmap.MAP_SHARED", act=act)) - measured("")
    assert 600 * MIB > shared > 500 * MIB


def test_what_children_have_for_themselves_counts() -> None:
    act = "block[:] = b'2' * (256 << 20)"
    private = measured(CHILD.format(flags="mmap.MAP_PRIVATE", act=act)) - measured("")
    assert 1100 * MIB > private > 1000 * MIB
