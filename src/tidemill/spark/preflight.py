"""The checks before Spark starts: handler, final settings, partitions and engines."""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import inspect
import os
import re
import struct
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import confluent_kafka as ck
import structlog

from tidemill.config.kafka_names import describe_creation
from tidemill.config.loading import NO_TOPIC, revalidate
from tidemill.config.sections.kafka_settings import KafkaSettings
from tidemill.config.settings import Settings, SparkSettings, find_revoke_problem
from tidemill.core.errors import (
    ConfigError,
    HandlerError,
    RemoteError,
    SinkNotConfiguredError,
    TidemillError,
)
from tidemill.pipeline.handler.base import HOOKS, SYNCHRONOUS_HOOKS, WINDOW_HOOKS, Handler, overrides
from tidemill.runtime.files.lock import GroupInUseError
from tidemill.runtime.identity import EngineIdentity
from tidemill.runtime.kafka.client import LibraryLog, TopicAdmin, describe_client_error, make_client_config, scrub
from tidemill.runtime.kafka.topic_reader import TopicReader
from tidemill.runtime.log.user_code import locate_error
from tidemill.runtime.process.program_lookup import find_program
from tidemill.sinks.build import build_sinks
from tidemill.sources.membership import find_other_topics, make_consumer_config
from tidemill.spark.session.conf import is_local

log = structlog.get_logger(__name__)

ResultT = TypeVar("ResultT")
#: An `on_startup` that runs longer than this is named in the log.
STARTUP_SECONDS = 10.0
#: Hooks that concern tasks only.
_TASK_HOOKS = ("on_task_complete", "on_error")
_LOCAL = re.compile(r"local\[(\d+)(?:,\s*\d+)?\]")


def make_handler(handler: Handler[Any, Any] | type[Handler[Any, Any]]) -> Handler[Any, Any]:
    """Return the handler; a class is instantiated without arguments.

    Raises:
        HandlerError: The handler cannot be created, is not a `Handler`, or has hooks that cannot be called.
    """
    if isinstance(handler, type):
        name = handler.__name__
        try:
            handler = handler()
        except Exception as error:
            text = f"cannot create {name} without arguments: {error}; pass an instance instead"
            raise HandlerError(text) from error
    if not isinstance(handler, Handler):
        raise HandlerError(f"{type(handler).__name__} is not a handler; inherit from tidemill.Handler")
    _check_hooks(handler)
    return handler


def _check_hooks(handler: Handler[Any, Any]) -> None:
    # Each of these mistakes would otherwise dead-letter every single message.
    name = type(handler).__name__
    misspelt = _find_misspelt(handler)
    found = [hook for hook in WINDOW_HOOKS if overrides(handler, hook)]
    if not found:
        close = ((own, hook) for own, hook in misspelt.items() if hook in WINDOW_HOOKS)
        hint = next((f" (is {own!r} a misspelling of {hook}?)" for own, hook in close), "")
        raise HandlerError(
            f"{name} does not define arrange; write `async def arrange(self, messages, pending)`, or, for work without "
            f"tasks, `async def transform(self, messages)`{hint}"
        )
    if len(found) > 1:
        raise HandlerError(
            f"{name} defines both arrange and transform; keep `arrange` for work that needs tasks, or `transform`"
        )
    unused = [hook for hook in _TASK_HOOKS if found == ["transform"] and overrides(handler, hook)]
    if unused:
        log.warning("these hooks are never called, because transform has no tasks", hooks=unused)
    for own, hook in misspelt.items():
        log.warning("a method resembles a hook but will never be called; check its name", method=own, nearest_hook=hook)
    for hook in HOOKS:
        if overrides(handler, hook):
            _check_hook(getattr(handler, hook), hook, name)


def _check_hook(method: Any, hook: str, name: str) -> None:
    # A function with another name is a decorator's, which may return a coroutine without being one.
    written_here = inspect.ismethod(method) and method.__name__ == hook and not hasattr(method, "__wrapped__")
    if written_here and (inspect.isasyncgenfunction(method) or inspect.isgeneratorfunction(method)):
        raise HandlerError(f"{name}.{hook} has a `yield`, which makes it a generator; return a value instead")
    if written_here and inspect.iscoroutinefunction(method) == (hook in SYNCHRONOUS_HOOKS):
        wanted = "a plain def" if hook in SYNCHRONOUS_HOOKS else "an async def"
        raise HandlerError(
            f"{name}.{hook} must be {wanted}; write `{'def' if hook in SYNCHRONOUS_HOOKS else 'async def'} {hook}(...)`"
        )
    parameters = list(inspect.signature(getattr(Handler, hook)).parameters)
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):
        return  # unknown; the first call will fail if it is wrong
    try:
        signature.bind(*parameters[1:])
    except TypeError as error:
        raise HandlerError(f"{name}.{hook} must accept ({', '.join(parameters)}): {error}") from None


def _find_misspelt(handler: Handler[Any, Any]) -> dict[str, str]:
    """Return the methods whose names closely resemble hooks."""
    own = {name for klass in type(handler).__mro__ for name in vars(klass)} - set(dir(Handler))
    near = {name: difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.85) for name in sorted(own)}
    return {
        name: hooks[0] for name, hooks in near.items() if hooks and inspect.iscoroutinefunction(getattr(handler, name))
    }


class StartUp:
    """Runs a handler's `on_startup`; another thread can cancel it.

    Args:
        handler: The handler.
        settings: The settings for `on_startup`.
    """

    def __init__(self, handler: Handler[Any, Any], settings: Settings) -> None:
        self._handler = handler
        self._settings = settings
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None

    def run(self) -> Settings:
        """Run `on_startup` and return the resulting configuration.

        Raises:
            HandlerError: It raised an exception, or returned neither settings nor None.
            ConfigError: It made the configuration invalid.
        """
        name = f"{type(self._handler).__name__}.on_startup"
        watch = threading.Timer(
            STARTUP_SECONDS,
            log.warning,
            ("a hook has not returned",),
            {"hook": name, "seconds": STARTUP_SECONDS, "waits_for_it": "the start of the pipeline"},
        )
        watch.daemon = True
        watch.start()
        try:
            changed = _run_to_completion(self._call)
        except TidemillError:
            raise
        except Exception as error:
            where = locate_error(error)
            at = f" ({where})" if where else ""
            raise HandlerError(f"{name} raised {type(error).__name__}: {error}{at}") from error
        finally:
            watch.cancel()
        if changed is None:
            return self._settings
        if not isinstance(changed, Settings):
            raise HandlerError(f"{name} returned a {type(changed).__name__}; return the settings, or None")
        return revalidate(changed, name)

    def cancel(self) -> None:
        """Cancel `on_startup` if it is running; returns at once, callable from any thread."""
        loop, task = self._loop, self._task
        if loop is not None and task is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the run has ended
                loop.call_soon_threadsafe(task.cancel)

    async def _call(self) -> Any:
        self._task = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        return await self._handler.on_startup(self._settings.model_copy(deep=True))


def run_startup(handler: Handler[Any, Any], settings: Settings) -> Settings:
    """Run `on_startup` and return the resulting configuration; see `StartUp.run`."""
    return StartUp(handler, settings).run()


def with_full_paths(settings: Settings) -> Settings:
    """Return settings with absolute paths, which are valid in every engine's process."""
    settings = settings.model_copy(deep=True)
    for sink in settings.sinks.filesystem.values():
        sink.base_path = str(Path.cwd() / sink.base_path)
    settings.cache.path = str(Path.cwd() / settings.cache.path)
    if settings.history.path:
        settings.history.path = str(Path.cwd() / settings.history.path)
    if settings.dlq.path:
        settings.dlq.path = str(Path.cwd() / settings.dlq.path)
    return settings


def refuse_unrunnable(settings: Settings) -> None:
    """Reject a configuration with which no engine of a live pipeline could be built.

    Raises:
        ConfigError: The configuration is unusable.
    """
    refuse_no_sinks(settings)
    refuse_letter_files(settings)
    if problem := find_revoke_problem(settings):
        raise ConfigError(problem)
    check_client_config(settings)
    refuse_missing_program(settings)
    build_sinks(settings)


def refuse_missing_program(settings: Settings) -> None:
    """Reject a default program that does not exist on this host, if the engines run here.

    Raises:
        ConfigError: The program is missing; every task that does not name another one would fail.
    """
    # On a cluster, the program must exist on the engines' hosts instead.
    if settings.executor.binary_path and is_local(settings.spark):
        find_program(settings.executor)


def refuse_letter_files(settings: Settings) -> None:
    """Reject `dlq.path` in a live pipeline.

    Raises:
        ConfigError: `dlq.path` is set.
    """
    if settings.dlq.path:
        raise ConfigError(
            "dlq.path works only in bounded runs (tidemill backfill, process(df)); remove it to send the dead letters "
            f"of this live pipeline to the topic {settings.dlq_topic!r}"
        )


def refuse_no_sinks(settings: Settings) -> None:
    """Reject a pipeline without sinks.

    Raises:
        SinkNotConfiguredError: No sink is configured.
    """
    if settings.sinks.is_empty():
        raise SinkNotConfiguredError(
            "no sink is configured, so nothing can be delivered; add one, for example "
            "sinks: {filesystem: {out: {base_path: out}}}"
        )


def check_client_config(settings: Settings) -> None:
    """Check `kafka.client_config` with librdkafka, without connecting.

    Raises:
        ConfigError: librdkafka rejects a key or value; every engine would fail.
    """
    config = make_consumer_config(settings, "check")
    del config["bootstrap.servers"]
    try:
        ck.Consumer(config, logger=LibraryLog()).close()
    except (ck.KafkaException, TypeError, ValueError) as error:
        raise ConfigError(
            f"bad client configuration: {scrub(describe_client_error(error), config)}; correct kafka.client_config"
        ) from None


def has_source_topic(settings: Settings) -> bool:
    """Return whether the brokers currently know the source topic.

    Raises:
        ConfigError: The brokers do not let this client see the topic.
        RemoteError: The brokers do not respond.
    """
    config = make_client_config(settings.kafka, "", {})
    return TopicAdmin(config, "kafka").exists(settings.kafka.source_topic, wait_seconds=0)


def look_up_partitions(settings: Settings) -> int:
    """Return the number of partitions of the source topic, waiting for a topic that was just created.

    Raises:
        ConfigError: The brokers do not let this client see the topic.
        RemoteError: The brokers do not respond, or the topic does not exist.
    """
    kafka = settings.kafka
    config = make_client_config(kafka, "", {})
    if not TopicAdmin(config, "kafka").exists(kafka.source_topic):
        raise RemoteError(
            f"topic {kafka.source_topic!r} does not exist at {kafka.brokers}; "
            f"{describe_creation(kafka.source_topic, kafka.brokers)}, or change kafka.source_topic or kafka.brokers",
            retryable=False,
        )
    try:
        with TopicReader(kafka.brokers, client_config=config) as reader:
            return len(reader.partitions(kafka.source_topic))
    except (ck.KafkaException, TimeoutError) as error:
        raise RemoteError(
            f"cannot look up the partitions of topic {kafka.source_topic!r} at {kafka.brokers}: {error}; check that "
            "the broker is running and reachable from here"
        ) from error


def refuse_shared_group(settings: Settings, worker: str) -> None:
    """Reject a consumer group with members that read other topics.

    Args:
        settings: The settings of the pipeline.
        worker: The name of this worker; the caller holds its lock.

    Raises:
        GroupInUseError: The group has members that read another topic.
    """
    kafka = settings.kafka
    # The ids of this worker's engines differ only in the slot number at the end.
    own_prefix = EngineIdentity(worker, 0, "", kafka.consumer_group).instance_id.removesuffix("0")
    try:
        others = find_other_topics(settings, own_prefix)
    except (ck.KafkaException, struct.error, UnicodeDecodeError) as error:
        log.info("cannot look up the members of the consumer group", error=describe_client_error(error))
        return
    if others:
        topic, members = min(others.items())
        raise GroupInUseError(
            kafka.consumer_group, kafka.source_topic, f"{members[0]!r} on {kafka.brokers}, which reads topic {topic!r}"
        )


def warn_without_topic(configured: Settings, settings: Settings) -> None:
    """Warn about a pipeline whose topic was never configured.

    Args:
        configured: The settings as they were read.
        settings: The settings after `on_startup`.
    """
    topic = settings.kafka.source_topic
    if "source_topic" not in configured.kafka.model_fields_set and topic == KafkaSettings().source_topic:
        log.warning(NO_TOPIC.format(topic=topic))


def choose_engine_count(settings: SparkSettings, partitions: int) -> int:
    """Return the number of engines: as configured, or else the smaller of the numbers of partitions and cores.

    Raises:
        ConfigError: More engines are configured than the local master has cores; some would never start.
    """
    fixed = _LOCAL.fullmatch(settings.master)
    cores = int(fixed.group(1)) if fixed else len(os.sched_getaffinity(0))
    if settings.engines is None:
        return max(1, min(partitions, cores))
    if fixed and settings.engines > cores:
        raise ConfigError(
            f"spark.engines is {settings.engines}, but spark.master {settings.master!r} has only {cores} cores, "
            "and each engine needs one; use more cores or fewer engines, or set spark.master to local"
        )
    if settings.engines > partitions:
        log.warning(
            "there are more engines than partitions; some engines will be idle",
            engines=settings.engines,
            partitions=partitions,
        )
    return settings.engines


def _run_to_completion(start: Callable[[], Coroutine[Any, Any, ResultT]]) -> ResultT:
    """Run a coroutine to its end, even if this thread already has a running loop (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(start())
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: asyncio.run(start())).result()
