"""A `python` that starts in no time: it has a server (fork_server.py) fork the program, and stands for it.

What it is given goes to the program: arguments, environment, descriptors, namespaces, signals; the end of
the one is the end of the other. What it cannot hand on, options of the interpreter, the real one gets.
"""

import marshal
import os
import signal
import socket

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
_NAMESPACES = ("net", "uts", "mnt")


def main(server: str, real: str, words: list[str]) -> None:
    """Ends as the program does, which ``python`` and these words would be.

    Args:
        server: The path at which it listens.
        real: The interpreter.
        words: Of the command line.
    """
    unbuffered = "PYTHONUNBUFFERED" in os.environ or words[:1] == ["-u"]
    program = words[1:] if words[:1] == ["-u"] else words
    if not program or (program[0].startswith("-") and program[0] not in ("-m", "-c")):
        os.execv(real, [real, *words])
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    ignored = [int(signum) for signum in _SIGNALS if signal.getsignal(signum) == signal.SIG_IGN]
    request = {"words": program, "env": dict(os.environ), "cwd": os.getcwd(), "nice": os.nice(0)}
    request |= {"ignored": ignored, "unbuffered": unbuffered}
    namespaces = [os.open(f"/proc/self/ns/{name}", os.O_RDONLY) for name in _NAMESPACES]
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(server)
    message = marshal.dumps(request)
    socket.send_fds(connection, [len(message).to_bytes(8, "little")], [0, 1, 2, *namespaces])
    connection.sendall(message)
    answers = connection.makefile("r")
    pid = int(answers.readline())
    for signum in _SIGNALS:  # also what is ignored in the beginning, as the program may do otherwise later
        signal.signal(signum, lambda signum, _: os.kill(pid, signum))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    status = int(answers.readline() or signal.SIGKILL)  # the server has died, and the program with it
    if os.WIFSIGNALED(status):
        signum = os.WTERMSIG(status)
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
    os._exit(os.waitstatus_to_exitcode(status))
