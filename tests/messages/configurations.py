"""Wrong configurations, lists of triggers and handlers, whose messages are collected."""

from __future__ import annotations

#: Files.
FILES = (
    "kafka: {brokers: localhost}",
    "kafka: {brokers: 'kafka:90922'}",
    "kafka: {brokerz: 'a:9092'}",
    "kafka: {brokers: [a, b]}",
    "kafka: {source_topic: 5}",
    "kafka: {source_topic: 'no/topic'}",
    "kafka: {consumer_group: 'a b'}",
    "kafka: {max_poll_records: 0}",
    "kafka: {heartbeat_interval_ms: 50000}",
    "kafka: {on_parse_error: skip}",
    "kafka: {exactly_once: yes please}",
    "kafka: {client_config: {group.id: x}}",
    "kafka: {sasl.password: x}",
    "kafka:\n  brokers: a:9092\n  brokers: b:9092",
    "kafka:\n\tbrokers: a:9092",
    "kafka:\n  brokers a:9092",
    "kafka: [",
    "kafka: {}\n  executor: {}",
    '"A text."\nmore: text',
    "- kafka",
    "kafka:brokers",
    "kafak: {}",
    "executor: {max_executors: many}",
    "executor: {max_executors: 2.5}",
    "executor: {task_timeout_seconds: -1}",
    "executor: {env: {PATH: 5}}",
    "executor: {mode: resident}",
    "executor: {backpressure_low_multiplier: 9.0}",
    "executor: {retry_backoff: {initial_seconds: 100.0}}",
    "sinks: {filesystem: {base_path: out}}",
    "sinks: {filesystem: {out: {}}}",
    "sinks: {kafka: {out: {topic: ''}}}",
    "sinks: {postgres: {db: {dsn: 'mysql://u:hunter2@h/d'}}}",
    "sinks: {postgres: {db: {dsn: 'postgresql://h/d', statements: {s: {sql: 'DROP TABLE t'}}}}}",
    "sinks: {postgres: {db: {dsn: 'postgresql://h/d', pool_min: 9, pool_max: 2}}}",
    "sinks: {mongo: {m: {uri: 'mongodb://h', database: 'a b'}}}",
    "sinks: {http: {h: {url: 'ftp://h/'}}}",
    "sinks: {http: {h: {url: 'http://h/', headers: {Host: x}}}}",
    "sinks: {redis: {r: {url: 'h:6379'}}}",
    "sinks: {custom: {kafka: {x: {}}}}",
    "sinks: {cassandra: {x: {}}}",
    "delivery: {backoff: {multiplier: 0.5}}",
    "dlq: {topic: input-events}",
    "dlq: {path: letters, topic: x}",
    "kafka: {exactly_once: true}\nsinks: {filesystem: {f: {base_path: x}}}",
    "cache: {path: ''}",
    "logging: {level: LOUD}",
    "logging: {format: xml}",
    "store: {retention_events_days: -1}",
    "triggerer: {shared_stream_ack_timeout: 0}",
)

#: Environment variables.
VARIABLES = (
    {"TIDEMILL_KAFKA__BROKERZ": "a:1"},
    {"TIDEMILL_KAFKA": "a"},
    {"TIDEMILL_KAFKA_BROKERS": "a:1"},
    {"TIDEMILL_NOPE__X": "1"},
    {"TIDEMILL_KAFKA__BROKERS": "a:1", "TIDEMILL_kafka__brokers": "b:1"},
    {"TIDEMILL_EXECUTOR__ENV": "{"},
    {"TIDEMILL_EXECUTOR__MAX_EXECUTORS": "many"},
    {"TIDEMILL_CONFIG": "missing.yaml"},
)

#: Lists of triggers; `{}` stands for an entry that begins with the name x.
LISTS = (
    "",
    "a: b",
    "[",
    "- one",
    "- {classpath: a.B}",
    "- {name: 7, classpath: a.B}",
    "- {name: x}",
    "- {name: x, classpath: B}",
    "- {name: x, clas: a.B}",
    "- {name: x, classpath: mine.Fires, kwargs: [1]}",
    "- {name: x, classpath: mine.Fires, kwargs: {at: 2030-01-01}}",
    "- {name: x, classpath: mine.Fires, kwargs: {n: .nan}}",
    "- {name: x, classpath: mine.Fires, restart: sometimes}",
    "- {name: x, classpath: mine.Fires}\n- {name: x, classpath: mine.Fires}",
    "- {name: x, classpath: mine.Fire}",
    "- {name: x, classpath: mine.Fires, kwargs: {conut: 1}}",
    "- {name: x, classpath: mine.Needs}",
    "- {name: x, classpath: mine.Raises}",
    "- {name: x, classpath: mine.Other}",
    "- {name: x, classpath: mine.Unfinished}",
    "- {name: x, classpath: mnie.Fires}",
    "- {name: x, classpath: broken.Fires}",
    "- {name: x, classpath: incomplete.Fires}",
    "- {name: x, classpath: tidemill.KafkaTrigger}",
    "- {name: x, classpath: tidemill.triggers.builtin.kafka.KafkaTrigger}",
)

#: Arguments of the triggers that ship, by their class.
ARGUMENTS = (
    ("kafka.KafkaTrigger", "topic: 'a/b'"),
    ("kafka.KafkaTrigger", "topic: t, brokers: localhost"),
    ("kafka.KafkaTrigger", "topic: t, group: 'a b'"),
    ("kafka.KafkaTrigger", "topic: t, max_redeliveries: -1"),
    ("kafka.KafkaTrigger", "topic: t, client_config: {group.id: x}"),
    ("kafka.KafkaTrigger", "topic: t, value_format: xml"),
    ("kafka.KafkaTrigger", "topic: t, on_invalid: drop"),
    ("kafka.KafkaTrigger", "topic: t, key: 5"),
    ("kafka.KafkaTrigger", "topic: t, apply: 5"),
    ("kafka.KafkaTrigger", "topic: t, apply: function"),
    ("kafka.KafkaTrigger", "topic: t, apply: mine.nothing"),
    ("kafka.KafkaTrigger", "topic: t, apply: nowhere.function"),
    ("kafka.KafkaTrigger", "topic: t, where: [1]"),
    ("kafka.KafkaTrigger", "topic: t, where: {total: {above: 5}}"),
    ("kafka.KafkaTrigger", "topic: t, where: {total: {in: 5}}"),
    ("kafka.KafkaTrigger", "topic: t, where: {total: {ge: [1]}}"),
    ("sqs.SqsTrigger", "queue: ''"),
    ("sqs.SqsTrigger", "queue: q, reject_queue: q"),
    ("sqs.SqsTrigger", "queue: q, visibility_seconds: 1"),
    ("sqs.SqsTrigger", "queue: q, wait_seconds: 60"),
    ("sqs.SqsTrigger", "queue: q, endpoint_url: 'http://u:hunter2@h/'"),
    ("directory.DirectoryTrigger", "path: ''"),
    ("directory.DirectoryTrigger", "path: x, rescan_seconds: 0"),
    ("directory.DirectoryTrigger", "path: x, missing: ignore"),
    ("file.FileTrigger", "path: ''"),
    ("file.FileTrigger", "path: x, poll_seconds: 0"),
    ("file.FileTrigger", "path: x, settle_seconds: -1"),
    ("http.HttpTrigger", "url: 'ftp://u:hunter2@h/x'"),
    ("http.HttpTrigger", "url: 'http://h/', poll_seconds: 0"),
    ("process.ProcessExitTrigger", "pid: one"),
    ("process.ProcessExitTrigger", "pid: 0"),
    ("temporal.DateTimeTrigger", "moment: soon"),
    ("temporal.DateTimeTrigger", "moment: 5"),
    ("temporal.DateTimeTrigger", "moment: '2030-01-01T00:00:00'"),
    ("temporal.TimeDeltaTrigger", "delta: soon"),
    ("temporal.TimeDeltaTrigger", "delta: 1.0e+300"),
)

TRIGGERS = """
from tidemill.triggers.base import BaseTrigger
class Fires(BaseTrigger):
    def __init__(self, count=1): pass
    def serialize(self): return "mine.Fires", {}
    async def run(self): yield
class Needs(Fires):
    def __init__(self, count): pass
class Raises(Fires):
    def __init__(self): raise RuntimeError("the database is away")
class Unfinished(BaseTrigger):
    pass
class Other: pass
"""

HANDLERS = """
from tidemill.pipeline.handler.base import Handler
class Base(Handler):
    async def arrange(self, messages, pending): return []
class Good(Base): pass
class Needs(Base):
    def __init__(self, size): pass
class Raises(Base):
    def __init__(self): raise RuntimeError("the model is not there")
class NoArrange(Handler): pass
class Misspelt(Handler):
    async def arange(self, messages, pending): return []
class NotAsync(Handler):
    def arrange(self, messages, pending): return []
class Generator(Handler):
    async def arrange(self, messages, pending): yield []
class OtherArguments(Handler):
    async def arrange(self, messages): return []
class AsyncParser(Base):
    async def deserialize_message(self, message): return b""
class NoHandler: pass
number = 5
"""

#: What `--handler` may name.
SPECS = (
    "handlers_here",
    "handlers_here.Good",
    "handlers_here.py:Good",
    "handler_here:Good",
    "handlers_here:Goood",
    "handlers_here:NoHandler",
    "handlers_here:number",
    "handlers_here:Needs",
    "handlers_here:Raises",
    "handlers_here:NoArrange",
    "handlers_here:Misspelt",
    "handlers_here:NotAsync",
    "handlers_here:Generator",
    "handlers_here:OtherArguments",
    "handlers_here:AsyncParser",
    "broken:Good",
    "raising:Good",
    "incomplete:Good",
    "no_handlers:Good",
)
