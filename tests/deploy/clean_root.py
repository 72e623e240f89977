"""A file system of its own for a process, without a container engine: Debian's debootstrap makes the base that an
official Python image is made of, unshare and chroot run commands in it. For root on Linux only.

What a Docker daemon hands in from its host, the way to the package indexes, comes in as read-only mounts.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.deploy.tools import TOOLS, missing_tool

# What the official image adds to Debian's minimal system, and the libraries that Python's modules are linked to.
PACKAGES = (
    "ca-certificates", "netbase", "tzdata", "libbz2-1.0", "libexpat1", "libffi8", "libgdbm6", "liblzma5",
    "libncursesw6", "libreadline8", "libsqlite3-0", "libssl3", "libuuid1", "zlib1g",
)  # fmt: skip
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
MINOR = f"{sys.version_info.major}.{sys.version_info.minor}"


def cannot() -> str | None:
    """Why no root can be made here; None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "a clean root is made by root on Linux"
    for command in ("unshare", "chroot", "mount", "nsenter", "dpkg-deb"):
        if shutil.which(command) is None:
            return f"a clean root needs {command}"
    if Path(sys.base_prefix) == Path("/usr"):
        return "a clean root needs a Python that can be copied, not the system's"
    if subprocess.run(["unshare", "--mount", "--pid", "--fork", "true"], capture_output=True).returncode:
        return "namespaces cannot be made here"
    return missing_tool("debootstrap")


@dataclass(frozen=True)
class Root:
    """A directory to run commands in."""

    path: Path

    def command(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str],
        user: str = "0:0",
        workdir: str = "/",
        mounts: Mapping[Path, str] | None = None,
        read_only_mounts: Mapping[Path, str] | None = None,
        read_only: bool = False,
        tmpfs: Sequence[str] = (),
    ) -> list[str]:
        """The words to start: `words` as process 1 of a process namespace, in this root, with just `env`.

        mounts: what of outside to show where inside; tmpfs: places that are writable and forgotten."""
        script = [
            "set -e",
            f"R={shlex.quote(str(self.path))}",
            'mount --bind "$R" "$R"',
            'mount -t tmpfs -o mode=755 tmpfs "$R/dev"',
            f'for d in {" ".join(DEVICES)}; do touch "$R/dev/$d"; mount --bind "/dev/$d" "$R/dev/$d"; done',
            'mkdir "$R/dev/shm"; mount -t tmpfs -o mode=1777 tmpfs "$R/dev/shm"',
            'ln -s /proc/self/fd "$R/dev/fd"',
            'mount -t proc proc "$R/proc"',
            'mount --rbind /sys "$R/sys"',
        ]
        for options, places in (("bind", mounts or {}), ("bind,ro", read_only_mounts or {})):
            for outside, inside in places.items():
                script += _bind(outside, inside, options)
        script += [f'mkdir -p "$R{place}"; mount -t tmpfs -o mode=1777 tmpfs "$R{place}"' for place in tmpfs]
        if read_only:
            script.append('mount -o remount,bind,ro "$R"')
        variables = [f"{name}={value}" for name, value in env.items()]
        inner = ["env", "-i", *variables, "/bin/sh", "-c", f'cd {shlex.quote(workdir)} && exec "$@"', "sh", *words]
        script.append(f'exec chroot --userspec={user} --groups= "$R" {shlex.join(inner)}')
        namespaces = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child"]
        return [*namespaces, "sh", "-c", "\n".join(script)]

    def run(self, words: Sequence[str], timeout_s: float = 1200, **options: Any) -> str:
        """stdout and stderr of `command`. Raises AssertionError with them if it fails."""
        done = subprocess.run(
            self.command(words, **options),
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, text=True, timeout=timeout_s,
        )  # fmt: skip
        assert done.returncode == 0, f"{shlex.join(words)} failed ({done.returncode}):\n{done.stdout[-4000:]}"
        return done.stdout

    def copy(self, to: Path) -> Root:
        subprocess.run(["cp", "-a", "--reflink=auto", str(self.path), str(to)], check=True)
        return Root(to)

    def size(self) -> int:
        """Bytes of its files, each counted once however many names it has."""
        files = {(s.st_dev, s.st_ino): s.st_size for s in map(os.lstat, self.walk())}
        return sum(files.values())

    def walk(self) -> list[str]:
        return [os.path.join(folder, name) for folder, _, names in os.walk(self.path) for name in names]


def _bind(outside: Path, inside: str, options: str) -> list[str]:
    make = 'mkdir -p "$T"' if outside.is_dir() else 'mkdir -p "${T%/*}"; [ -e "$T" ] || : > "$T"'
    lines = [f'T="$R"{shlex.quote(inside)}', make, f'mount --bind {shlex.quote(str(outside))} "$T"']
    return [*lines, 'mount -o remount,bind,ro "$T"'] if options.endswith("ro") else lines


# -- the base that an official Python image is --------------------------------------------------------------------


def python_base(suite: str) -> Root:
    """Debian `suite` and this Python under /usr/local, as python:X.Y-slim-SUITE has them. Made once, then kept."""
    kept = Root(TOOLS / f"python{MINOR}-{suite}")
    if not kept.path.is_dir():
        debian = debian_base(suite, PACKAGES)
        making = debian.copy(TOOLS / f"making-{os.getpid()}")
        _put_python(making)
        making.path.rename(kept.path)
    return kept


def debian_base(suite: str, packages: Sequence[str]) -> Root:
    """Debian's minimal system and `packages`. Made once, then kept."""
    kept = Root(TOOLS / f"debian-{suite}")
    if not kept.path.is_dir():
        making = TOOLS / f"debootstrap-{os.getpid()}"
        script = TOOLS / "debs/debootstrap/usr/sbin/debootstrap"
        words = [str(script), "--variant=minbase", "--include=" + ",".join(packages), suite, str(making), _mirror()]
        env = {**os.environ, "DEBOOTSTRAP_DIR": str(script.parents[1] / "share/debootstrap"), "PATH": PATH}
        done = subprocess.run(words, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=900)
        assert done.returncode == 0, f"debootstrap failed:\n{done.stdout[-3000:]}"
        # as the official images: no downloaded packages, no lists
        for folder in ("var/cache/apt/archives", "var/lib/apt/lists"):
            shutil.rmtree(making / folder)
            (making / folder / "partial").mkdir(parents=True)
        making.rename(kept.path)
    return kept


def _put_python(root: Root) -> None:
    """This Python without its packages, tests and static library; the image's make has the same rules."""
    source, target = Path(sys.base_prefix), root.path / "usr/local"
    library = f"lib/python{MINOR}"
    skipped = shutil.ignore_patterns("site-packages", "test", "tests", "__pycache__", "idlelib", "config-*")
    shutil.copytree(source / library, target / library, symlinks=True, ignore=skipped, dirs_exist_ok=True)
    (target / library / "site-packages").mkdir()
    for shared in source.glob("lib/libpython*.so*"):
        shutil.copy2(shared, target / "lib", follow_symlinks=False)
    shutil.copy2(source / f"bin/python{MINOR}", target / "bin")
    for name in ("python3", "python"):
        (target / "bin" / name).symlink_to(f"python{MINOR}")
    root.run(["ldconfig"], env={"PATH": PATH})
    root.run(["python3", "-m", "ensurepip"], env={"PATH": PATH})
    (target / "bin/pip").symlink_to("pip3")


def _mirror() -> str:
    """Where this machine gets its Debian packages."""
    places = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for place in filter(Path.is_file, places):
        for pattern in (r"^URIs:\s*(\S+/debian)/?\s*$", r"^deb\s+(?:\[.*?\]\s+)?(\S+/debian)/?\s"):
            if place.suffix in (".list", ".sources") and (match := re.search(pattern, place.read_text(), re.M)):
                return match[1]
    raise AssertionError("this machine's sources name no Debian mirror")


# -- the way to the package indexes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Network:
    """What of the machine a build step sees: names, certificates, pip's settings and local indexes, apt's."""

    env: Mapping[str, str] = field(default_factory=dict)
    mounts: Mapping[Path, str] = field(default_factory=dict)


def network() -> Network:
    wanted = ("PIP_", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
    env = {name: value for name, value in os.environ.items() if name.startswith(wanted)}
    env = {name: value for name, value in env.items() if name != "PIP_REQUIRE_VIRTUALENV"}
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
    places = {Path(word) for word in re.findall(r"(?:file://)?(/[^\s'\"]+)", listed + " ".join(env.values()))}
    places |= {Path("/etc/pip.conf"), Path("/etc/xdg/pip"), Path("/etc/resolv.conf"), Path("/etc/hosts")}
    places |= {Path("/etc/ssl/certs"), Path("/usr/share/ca-certificates"), Path("/usr/local/share/ca-certificates")}
    places |= set(Path("/etc/apt").glob("apt.conf.d/99*"))
    places = {place.parent if place.name == "simple" else place for place in places}
    return Network(env, {place: str(place) for place in sorted(places) if place.exists()})
