"""The named calls of the store: each is a request as a value, typed with its answer.

`service_calls`: services, files, scheduler. `worker_calls`, `trigger_calls`: workers and triggerers. `task_calls`:
calls of running attempts. The other modules hold the calls of the command line and the web pages, by subject: DAGs,
runs, task instances, elements of mapped tasks, XComs, logs, callbacks, counts, settings.

A new call is a class in one of these modules, declared with `answered_by`, and the function it names in `queries`.
"""
