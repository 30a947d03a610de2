"""Two hosts with addresses of their own train one model; one is cut off, and the other goes on by itself.

    sudo python benchmarks/two_hosts.py --folder runs/two-hosts

The hosts are network namespaces of this machine (Linux, root), joined by a virtual cable. In each `torchrun` starts one
process; they meet by rendezvous. After some steps the cable is pulled: nobody tells either side. The host that keeps
the rendezvous must notice, begin anew alone from the last checkpoint, and end where a run of one process does, but for
rounding, which hundreds of steps amplify.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

HOSTS = {"mae-a": "10.77.0.1", "mae-b": "10.77.0.2"}
_SILENCE = 20
"""Seconds after which a silent process counts as lost."""
_OPTIONS = (
    "--model mae_vit_lesson_patch4 --img-size 8 --patch-size 2 --batch-size 64 --steps 300 --checkpoint-every 10 "
    "--device cpu --workers 0 --no-doctor"
).split()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


@contextmanager
def hosts() -> Iterator[None]:
    """Both namespaces, with a cable between them."""
    for name in HOSTS:
        ip("netns", "add", name)
    try:
        ip("link", "add", "va", "netns", "mae-a", "type", "veth", "peer", "name", "vb", "netns", "mae-b")
        for (name, address), device in zip(HOSTS.items(), ("va", "vb"), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
            for each in (device, "lo"):
                ip("-n", name, "link", "set", each, "up")
        yield
    finally:
        for name in HOSTS:
            ip("netns", "del", name)


def start(host: str, device: str, out: Path) -> subprocess.Popen[bytes]:
    # Names of hosts are not those of the addresses here, so each is told whether it keeps the rendezvous.
    keeps = int(host == "mae-a")
    launcher = [
        str(Path(sys.executable).with_name("torchrun")), "--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3",
        "--rdzv-backend=c10d", "--rdzv-id=two-hosts", f"--rdzv-endpoint={HOSTS['mae-a']}:29400",
        f"--local-addr={HOSTS[host]}", f"--rdzv-conf=is_host={keeps},last_call_timeout=5",
    ]  # fmt: skip
    command = [*launcher, "-m", "mae", "pretrain", "builtin:digits", *_OPTIONS, "--out", str(out)]
    environment = {
        **os.environ, "GLOO_SOCKET_IFNAME": device, "OPENMAE_TIMEOUT": str(_SILENCE), "OMP_NUM_THREADS": "1"
    }  # fmt: skip
    log = out.with_name(f"{host}.log").open("wb")
    return subprocess.Popen(
        ["ip", "netns", "exec", host, *command], env=environment, stdout=log, stderr=log, start_new_session=True
    )


def rows(run: Path) -> list[dict[str, Any]]:
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    found = [json.loads(line) for line in lines if line.endswith("}")]
    return [row for row in found if "loss" in row]


def wait_for_step(run: Path, step: int, job: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 300
    while not rows(run) or rows(run)[-1]["step"] < step:
        if time.monotonic() > deadline or job.poll() is not None:
            raise TimeoutError(f"step {step} was not reached; see {run.parent}/*.log")
        time.sleep(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs/two-hosts"))
    parser.add_argument("--cut-at", type=int, default=60, help="the step after which the cable is pulled")
    args = parser.parse_args()
    folder = args.folder.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    alone, together = folder / "alone", folder / "together"
    mae = [sys.executable, "-m", "mae", "pretrain", "builtin:digits", *_OPTIONS, "--out", str(alone)]
    subprocess.run(mae, check=True, stdout=subprocess.DEVNULL, env={**os.environ, "OMP_NUM_THREADS": "1"})
    with hosts():
        jobs = [start(host, device, together) for host, device in zip(HOSTS, ("va", "vb"), strict=True)]
        try:
            wait_for_step(together, args.cut_at, jobs[0])
            before = rows(together)[-1]["step"]
            ip("-n", "mae-b", "link", "set", "vb", "down")
            cut = time.monotonic()
            checkpoints = sorted(path.name for path in (together / "checkpoints").glob("step-*"))
            wait_for_step(together, before + 50, jobs[0])
            again = time.monotonic() - cut
            code = jobs[0].wait(300)
        finally:
            for job in jobs:
                with suppress(ProcessLookupError):  # it has ended
                    os.killpg(job.pid, signal.SIGKILL)
                job.wait()
    losses = [{row["step"]: row["loss"] for row in rows(run)} for run in (alone, together)]
    largest = max(abs(losses[0][step] - losses[1][step]) / losses[0][step] for step in losses[0])
    print(json.dumps({
        "cut after step": before, "last checkpoint then": checkpoints[-1],
        "seconds until 50 steps further": round(again, 1),
        "silence that counts as loss": _SILENCE, "exit code": code, "steps": len(losses[1]),
        "largest relative loss difference to one process": largest,
    }, indent=2))  # fmt: skip
    if code != 0 or losses[0].keys() != losses[1].keys() or largest > 0.1:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
