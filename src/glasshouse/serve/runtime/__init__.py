"""Requests while they run: the thread that steps the engines, jobs, queues and deadlines."""
