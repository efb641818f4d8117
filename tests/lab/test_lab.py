"""The lab itself: hosts apart, links capped, cuts silent, nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.e2e.forked import forking_variables

pytestmark = [pytest.mark.lab, pytest.mark.timeout(60)]

LAB = Path(__file__).resolve().parents[2] / "scripts" / "lab"
NGINX_FOLDER = Path("/usr/lib/nginx/modules")
NGINX_MODULES = ("ndk_http_module.so", "ngx_http_lua_module.so")
TIMED_OUT = 28  # curl's exit status; a refused or unreachable peer would be 7
OBJECT_BYTES = 32 << 20
SHARED_RATE = 400e6
PER_HOST_RATE = 80e6
LETTER = os.environ.get("FASTLOAD_LAB", "")  # of the lab that these tests use
PREFIX = f"fl{LETTER}-"
STORAGE = f"{PREFIX}storage"
HOST_1, HOST_2 = f"{PREFIX}host1", f"{PREFIX}host2"
NAME = f"fastload{LETTER}-lab"
STATE = Path(os.environ.get("FASTLOAD_LAB_DIR", f"/run/{NAME}"))
HEADERS_SHARE = 1500 / 1566  # of a full frame as tc counts it, what TCP delivers: 95.7 %


def lab(name: str, *args: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run one entry point with this interpreter's environment first on its path."""
    done = subprocess.run(
        [str(LAB / name), *args],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        env=os.environ | {"VIRTUAL_ENV": sys.prefix} | environment,
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


def why_not() -> str | None:
    if sys.platform != "linux" or os.geteuid() != 0:
        return "the lab needs Linux and root"
    path = os.pathsep.join([f"{sys.prefix}/bin", os.environ["PATH"], "/usr/sbin", "/sbin"])
    tools = ("ip", "tc", "nginx", "rclone", "curl", "unshare", "hostname", "mount", "torchrun")
    missing = [tool for tool in tools if shutil.which(tool, path=path) is None]
    missing += [f"nginx's {name}" for name in NGINX_MODULES if not (NGINX_FOLDER / name).exists()]
    if missing:
        return f"the lab lacks {', '.join(missing)}; run scripts/lab/setup"
    namespaces = list(Path("/run/netns").glob(f"{PREFIX}*"))
    if any(map(os.path.ismount, namespaces)):
        return "somebody's lab is up; end it with scripts/lab/down"
    if namespaces or STATE.exists():  # the machine has been restarted meanwhile
        lab("down")
    return None


@pytest.fixture(autouse=True, scope="module")
def _usable() -> None:
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture(scope="module")
def payload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("payload") / "object.bin"
    path.write_bytes(os.urandom(OBJECT_BYTES))
    return path


def traces() -> dict[str, object]:
    """What this lab could leave behind on the machine, where others may come and go."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    ours = [place for place in mounts if PREFIX in place or NAME in place]
    places = (*Path("/etc/netns").glob(f"{PREFIX}*"), f"/run/{NAME}", f"/var/tmp/{NAME}")
    return {
        "mounts": sorted(ours),
        "places": [str(place) for place in places if os.path.exists(place)],
        "links": sorted(os.listdir("/sys/class/net")),
        "services": [
            path.parent.name
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if f"/{NAME}/".encode() in path.read_bytes()
        ],
    }


@pytest.fixture(scope="module")
def two_hosts(_usable: None, payload: Path) -> Iterator[Path]:
    """Two hosts, a shared storage link, one object; and not a trace afterwards."""
    before = traces()
    try:
        lab("up", "2", "--host-rate", "1gbit", "--storage-rate", "400mbit")
        lab("put", str(payload), "object.bin")
        yield payload
    finally:
        lab("down")
    assert traces() == before


def on(host: str, *command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    return lab("run", "--plain", "--on", host, "--", *command, check=check)


def reaches(host: str, address: str, within_s: int = 20) -> int:
    url = f"http://{address}:8080/object.bin"
    curl = ("curl", "-sf", "-m", str(within_s), "-r", "0-99", "-o", os.devnull, url)
    return on(host, *curl, check=False).returncode


def measured_rate(output: str) -> float:
    """Bits per second out of what `fetch` printed."""
    status, bytes_per_s = output.split()
    assert status == "206"
    return 8 * float(bytes_per_s)


def require_capped(measure: Callable[[], list[str]], rate: float) -> None:
    """Links carry their rate and no more; a busy machine may keep a few downloads from it, but not all."""
    for _ in range(5):
        rates = [measured_rate(output) for output in measure()]
        assert max(rates) < 1.1 * HEADERS_SHARE * rate
        if min(rates) > 0.9 * HEADERS_SHARE * rate:
            return
    raise AssertionError(rates)


def fetch(num_bytes: int) -> list[str]:
    form = "%{http_code} %{speed_download}\n"
    url = f"http://{STORAGE}:8080/object.bin"
    return ["curl", "-sf", "-r", f"0-{num_bytes - 1}", "-o", os.devnull, "-w", form, url]


# These come first: below, one lab stays up to the end of the module.


@pytest.mark.usefixtures("_usable")
def test_each_host_has_its_own_share_of_storage(payload: Path) -> None:
    try:
        lab("up", "2", "--host-rate", "1gbit", "--per-host-storage-rate", "80mbit")
        lab("put", str(payload), "object.bin")

        def measure() -> list[str]:
            before = set(STATE.glob("logs/*/*"))
            done = lab("run", "--plain", "--keep-logs", "--", *fetch(8 << 20))
            logs = set(STATE.glob("logs/*/*")) - before
            assert len(logs) == 1, "of the second host"
            return [done.stdout, *(log.read_text() for log in logs)]

        require_capped(measure, PER_HOST_RATE)
    finally:
        lab("down")


@pytest.mark.usefixtures("_usable")
def test_down_with_nothing_up_is_fine() -> None:
    before = traces()
    lab("down")
    assert traces() == before


def test_run_gives_each_host_a_rank_a_name_and_a_way_to_the_others(two_hosts: Path, tmp_path: Path) -> None:
    script = tmp_path / "names.py"
    script.write_text(
        textwrap.dedent("""
        import json, os, socket
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        total = torch.ones(1)
        dist.all_reduce(total)
        names = [None] * dist.get_world_size()
        dist.all_gather_object(names, socket.gethostname())
        if dist.get_rank() == 0:
            print(json.dumps({"total": total.item(), "names": names}))
        dist.destroy_process_group()
        """)
    )
    done = lab("run", "--timeout", "40", "--", "python", str(script), **forking_variables())
    assert json.loads(done.stdout) == {"total": 2.0, "names": [HOST_1, HOST_2]}


def test_bytes_counts_what_one_host_read(two_hosts: Path) -> None:
    before = json.loads(lab("bytes").stdout)
    on(HOST_2, *fetch(OBJECT_BYTES))
    after = json.loads(lab("bytes").stdout)
    sent = after["storage_tx"] - before["storage_tx"]
    received = after["hosts"][HOST_2]["rx"] - before["hosts"][HOST_2]["rx"]
    elsewhere = after["hosts"][HOST_1]["rx"] - before["hosts"][HOST_1]["rx"]
    assert OBJECT_BYTES < received <= sent < 1.01 * OBJECT_BYTES
    assert elsewhere < 10_000


def test_shared_storage_link_is_capped(two_hosts: Path) -> None:
    require_capped(lambda: [on(HOST_1, *fetch(OBJECT_BYTES)).stdout], SHARED_RATE)


def test_s3_answers_ranges_with_the_right_bytes(two_hosts: Path) -> None:
    subnet = ord(LETTER) - ord("a") + 1 if LETTER else 0
    url = f"http://10.77.{subnet}.254:9000/lab/object.bin"
    signed = ("--aws-sigv4", "aws:amz:us-east-1:s3", "--user", "labkey:labsecret")
    form = ("-w", "%{http_code}", "-o", str(two_hosts.parent / "part.bin"))
    done = on(HOST_1, "curl", "-sf", *signed, *form, "-r", "1000-2999", url)
    assert done.stdout == "206"
    part = (two_hosts.parent / "part.bin").read_bytes()
    assert part == two_hosts.read_bytes()[1000:3000]


@pytest.mark.slow(but=["option1"])
@pytest.mark.parametrize("option", [(), ("--storage",)])
def test_cut_is_silent_and_heals(two_hosts: Path, option: tuple[str, ...]) -> None:
    lab("cut", HOST_1, *option)
    assert reaches(HOST_1, STORAGE, within_s=1) == TIMED_OUT
    assert reaches(HOST_2, STORAGE) == 0
    # Nothing listens there: refused if the way is open.
    peer = reaches(HOST_1, HOST_2) if option else reaches(HOST_1, HOST_2, within_s=1)
    assert peer == (7 if option else TIMED_OUT)
    lab("heal", HOST_1)
    assert reaches(HOST_1, STORAGE) == 0


def test_run_fails_with_the_failing_hosts_status_and_words(two_hosts: Path) -> None:
    script = f'test "$(hostname)" = {HOST_1} || {{ echo no luck >&2; exit 7; }}'
    done = lab("run", "--plain", "--", "sh", "-c", script, check=False)
    assert done.returncode == 7
    assert f"[{HOST_2}] no luck" in done.stderr


def test_run_ends_everything_at_its_timeout(two_hosts: Path) -> None:
    done = lab("run", "--plain", "--timeout", "1", "--", "sleep", "1234", check=False)
    assert done.returncode == 124
    commands = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline")]
    assert b"sleep\x001234\x00" not in commands


def test_second_up_is_refused(two_hosts: Path) -> None:
    done = lab("up", "2", check=False)
    assert done.returncode == 1
    assert "already" in done.stderr
    assert reaches(HOST_1, STORAGE) == 0


def test_another_lab_beside_it_is_its_own(two_hosts: Path, tmp_path: Path) -> None:
    letter = "y" if LETTER == "z" else "z"
    other = {"FASTLOAD_LAB": letter, "FASTLOAD_LAB_DIR": str(tmp_path / "lab")}
    try:
        lab("up", "1", **other)
        done = lab("run", "--plain", "--", "hostname", **other)
        assert done.stdout == f"fl{letter}-host1\n"
        assert reaches(HOST_1, STORAGE) == 0
    finally:
        lab("down", **other)
    assert not (tmp_path / "lab").exists()
    assert reaches(HOST_1, STORAGE) == 0


def test_a_storage_that_answers_late_and_refuses(two_hosts: Path, tmp_path: Path) -> None:
    letter = "y" if LETTER == "z" else "z"
    other = {"FASTLOAD_LAB": letter, "FASTLOAD_LAB_DIR": str(tmp_path / "lab")}
    address = f"10.77.{ord(letter) - ord('a') + 1}.254"
    nbytes = 1_000_000
    one = (
        "-r",
        f"0-{nbytes - 1}",
        "-w",
        "%{http_code} %{time_starttransfer} %{time_total}",
        "-o",
        os.devnull,
    )
    signed = ("--aws-sigv4", "aws:amz:us-east-1:s3", "--user", "labkey:labsecret")
    try:
        lab("up", "1", "--latency", "200ms", "--connection-rate", "5MB/s", "--requests-rate", "10", **other)
        lab("put", str(two_hosts), "object.bin", **other)
        for words in (
            (f"http://{address}:8080/object.bin",),
            (*signed, f"http://{address}:9000/lab/object.bin"),
        ):
            done = lab("run", "--plain", "--", "curl", "-sf", *one, *words, **other)
            status, first_s, all_s = done.stdout.split()
            assert status == "206"
            assert float(first_s) > 0.6 * 0.2
            assert float(all_s) - float(first_s) > 0.8 * nbytes / 5e6
        # The storage lets 5 through at once, and then 10 a second.
        many = ("-Z", "-o", f"{tmp_path}/#1", "-w", "%{http_code}\n", f"http://{address}:8080/none[1-60]")
        done = lab("run", "--plain", "--", "curl", "-s", *many, check=False, **other)
        statuses = done.stdout.split()
        assert set(statuses) == {"404", "503"}, statuses
    finally:
        lab("down", **other)
