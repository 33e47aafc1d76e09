"""A pipeline with fake engines, run as a process of its own: says on standard output when its engines work."""

from __future__ import annotations

import json
import os
import sys
import threading
import time

from tidemill.config.settings import Settings
from tidemill.pipeline.handler.base import Handler
from tidemill.spark.pipeline import Pipeline


class DrivenHandler(Handler[bytes, bytes]):
    drain_seconds = float(os.environ.get("DRAIN_SECONDS", "0"))

    async def arrange(self, messages, pending):
        return []


def tell(pipeline: Pipeline) -> None:
    while True:
        engines = pipeline.progress().engines
        if engines and all(engine.progress and engine.progress.consumed for engine in engines):
            print(json.dumps([engine.pid for engine in engines]), flush=True)
            return
        time.sleep(0.02)


def main() -> None:
    settings = Settings.model_validate_json(sys.argv[1])
    pipeline = Pipeline(DrivenHandler, settings=settings, factory="fake_engine:build")
    threading.Thread(target=tell, args=(pipeline,), daemon=True).start()
    sys.exit(pipeline.run())


if __name__ == "__main__":
    main()
