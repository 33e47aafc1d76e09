"""A standalone Spark cluster on this machine: a master and workers from the pyspark distribution, kept small.

Its Python has every package of this one but tidemill, so what runs there was shipped.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import urllib.request
from pathlib import Path
from typing import Any

import pyspark
from tests.until import wait_until

from tidemill.runtime.embedded.broker import free_port
from tidemill.runtime.embedded.java import find_java
from tidemill.spark.session.process_tree import kill_tree

SPARK_HOME = Path(pyspark.__file__).parent
#: What an executor gets; Spark refuses less than 450 MB.
EXECUTOR_MEMORY = "512m"


def python_without_tidemill(folder: Path) -> Path:
    """Make a virtual environment with this one's packages, but without tidemill, and return its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    target = next((folder / "lib").glob("python*/site-packages"))
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if "tidemill" not in entry.name.lower():
            (target / entry.name).symlink_to(entry)
    python = folder / "bin" / "python"
    found = subprocess.run([python, "-c", "import tidemill"], capture_output=True, text=True, env={}, cwd="/")
    assert "No module named 'tidemill'" in found.stderr, found
    return python


class Cluster:
    """One master and some workers, each with two cores."""

    def __init__(self, folder: Path, workers: int = 2) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[bytes]] = []
        try:
            self._set_up(workers)
        except BaseException:
            self.close()  # nobody else can
            raise

    def _set_up(self, workers: int) -> None:
        self.python = python_without_tidemill(self.folder / "python")
        port, self._ui = free_port(), free_port()
        self.master = f"spark://127.0.0.1:{port}"
        self._start("master.Master", "--port", str(port), "--webui-port", str(self._ui))
        wait_until(lambda: self.state() is not None, 60, what="a master that answers")
        self.workers = [self._worker() for _ in range(workers)]
        wait_until(lambda: len(self.alive()) == workers, 60, what="all workers registered")

    def _worker(self) -> subprocess.Popen[bytes]:
        work = self.folder / f"work{len(self.processes)}"
        options = ("--cores", "2", "--memory", "1200m", "--webui-port", "0", "--work-dir", str(work))
        return self._start("worker.Worker", *options, self.master)

    def _start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        env = {
            **{key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYSPARK_PYTHON")},
            "JAVA_HOME": str(find_java().home),
            "SPARK_HOME": str(SPARK_HOME),
            "SPARK_LOCAL_IP": "127.0.0.1",
            "SPARK_DAEMON_MEMORY": "192m",
            "SPARK_DAEMON_JAVA_OPTS": "-XX:+UseSerialGC -XX:TieredStopAtLevel=1",
        }
        command = [SPARK_HOME / "bin" / "spark-class", f"org.apache.spark.deploy.{name}", "--host", "127.0.0.1"]
        with open(self.folder / f"{name}.{len(self.processes)}.log", "wb") as log:
            process = subprocess.Popen(
                [*command, *arguments], env=env, cwd=self.folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.processes.append(process)
        return process

    def state(self) -> dict[str, Any] | None:
        """Return what the master says of itself."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._ui}/json/", timeout=60) as answer:
                found: dict[str, Any] = json.load(answer)
                return found
        except (OSError, json.JSONDecodeError):
            return None  # while it starts, there is nobody, and then a page for people

    def alive(self) -> list[dict[str, Any]]:
        """Return the workers that the master takes for alive."""
        return [worker for worker in (self.state() or {}).get("workers", []) if worker["state"] == "ALIVE"]

    def busy(self) -> int:
        """Return how many workers have an executor."""
        return sum(worker["coresused"] > 0 for worker in self.alive())

    def kill_worker(self, number: int) -> None:
        """Lose a host: the worker, its executors and the engines in them end at once."""
        kill_tree(self.workers[number].pid)

    def replace_worker(self, number: int) -> None:
        """Have a new worker in the place of one that was killed."""
        self.workers[number].wait(60)
        known = {worker["id"] for worker in self.alive()}
        self.workers[number] = self._worker()
        wait_until(lambda: {worker["id"] for worker in self.alive()} - known, 60, what="a new worker registered")

    def spark(self, **conf: str) -> dict[str, Any]:
        """Return the `spark` section of a pipeline on this cluster."""
        return {"master": self.master, "conf": {**self.conf(), **conf}}

    def conf(self) -> dict[str, str]:
        """Return the Spark configuration that keeps it small."""
        return {
            "spark.driver.host": "127.0.0.1",
            "spark.driver.bindAddress": "127.0.0.1",
            "spark.executor.cores": "1",
            "spark.executor.memory": EXECUTOR_MEMORY,
            "spark.cores.max": "2",
            "spark.pyspark.python": str(self.python),
        }

    def close(self) -> None:
        """End all of it."""
        for process in self.processes:
            if process.poll() is None:
                kill_tree(process.pid)
            process.wait(60)
