"""Make two hosts of this one: each with a name and an address of its own, joined by a cable that can be pulled.

They are Linux namespaces of two processes that sleep. Nothing of the machine itself changes, and with the last process
they are gone. Processors, files and shared memory are those of the machine.
"""

import contextlib
import os
import pathlib
import shutil
import subprocess
from collections.abc import Iterator

NAMES, ADDRESSES = ("left", "right"), ("10.77.0.1", "10.77.0.2")
_TABLE = "127.0.0.1 localhost\n" + "".join(f"{a} {n}\n" for a, n in zip(ADDRESSES, NAMES, strict=True))


class TwoHosts:
    """Start commands on either of two hosts.

    Attributes:
        tables: [2] their files of hosts' names; what is written there counts at once.
        agent: a program that Open MPI's mpirun starts its daemon on the other host by: in place of ssh.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        """Make them.

        Args:
            folder: for files.

        Raises:
            OSError: the machine does not let this user have namespaces.
        """
        self.tables, self.agent = [folder / f"hosts.{name}" for name in NAMES], folder / "agent"
        self._hosts: list[subprocess.Popen] = []
        try:
            for name, table in zip(NAMES, self.tables, strict=True):
                table.write_text(_TABLE)
                named = f"hostname {name} && mount --bind {table} /etc/hosts && ip link set lo up"
                script = f"{named} && echo && exec sleep 600"
                command = ["unshare", *_AS_ROOT, "--net", "--uts", "--mount", "sh", "-c", script]
                host = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
                self._hosts.append(host)
                said = host.stdout.readline()
                if said != "\n":
                    raise OSError(f"{' '.join(command)}: {said}")
            other = self._hosts[1].pid
            self.run(0, "ip", "link", "add", "cable", "type", "veth", "peer", "name", "cable", "netns", str(other))
            for i, address in enumerate(ADDRESSES):
                self.run(i, "ip", "address", "add", f"{address}/24", "dev", "cable")
                self.run(i, "ip", "link", "set", "cable", "up")
        except BaseException:
            self.close()
            raise
        # mpirun gives it the host's name first, of which there is only one, and then the words of a command.
        self.agent.write_text(f'#!/bin/sh\nshift\nexec {" ".join(self.on(1))} sh -c "$*"\n')
        self.agent.chmod(0o700)

    def on(self, host: int, *command: object) -> list[str]:
        """Return what runs a command there."""
        here = f"--wd={os.getcwd()}"  # else they begin in another folder
        return ["nsenter", "--target", str(self._hosts[host].pid), *_ENTERED, here, "--", *map(str, command)]

    def run(self, host: int, *command: str) -> None:
        """Run it; OSError if it fails."""
        done = subprocess.run(self.on(host, *command), capture_output=True, text=True, timeout=20)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr}")

    def pull_cable(self) -> None:
        """Cut the hosts off from each other."""
        self.run(1, "ip", "link", "set", "cable", "down")

    def close(self) -> None:
        """End both."""
        for host in self._hosts:
            host.kill()
            host.wait()


_AS_ROOT = () if os.geteuid() == 0 else ("--user", "--map-root-user")
_ENTERED = ["--net", "--uts", "--mount", *(() if os.geteuid() == 0 else ("--user", "--preserve-credentials"))]


@contextlib.contextmanager
def two_hosts(folder: pathlib.Path) -> Iterator[TwoHosts]:
    """Make two hosts, and end them; see `TwoHosts`."""
    missing = [name for name in ("unshare", "nsenter", "ip", "mount") if not shutil.which(name)]
    if missing:
        raise OSError(f"no {', '.join(missing)}")
    hosts = TwoHosts(folder)
    try:
        yield hosts
    finally:
        hosts.close()
