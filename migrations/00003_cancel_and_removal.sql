-- Who asked for the end of a task, and when, stays with its result. Removed
-- agents are found by the time of their removal, so that the owner of their
-- shard ends their tasks wherever they were removed. Programs of before this
-- file ignore all of it.

-- +goose Up
SET LOCAL lock_timeout = '2s';

ALTER TABLE agent_result ADD COLUMN cancel_requested_at timestamptz, ADD COLUMN cancel_actor text;

CREATE INDEX agent_removed ON agent (removed_at) WHERE status = 'removed';

CREATE OR REPLACE VIEW agent_task_view AS
SELECT t.id, t.agent_num, a.id AS agent_id, a.name AS agent_name, t.kind, t.args,
       CASE WHEN t.repeatable THEN 'repeatable' ELSE 'once' END AS delivery,
       t.priority, t.timeout_ms,
       CASE WHEN r.task_id IS NOT NULL THEN 'completed'
            WHEN q.started_at IS NOT NULL THEN 'waiting-for-agent-response'
            ELSE 'new' END AS state,
       r.outcome, r.reason, r.detail, r.exit, r.result, r.result_bytes, r.output_bytes,
       coalesce(r.attempt, q.attempt, l.attempt, 0::smallint) AS attempt,
       coalesce(r.epoch, q.epoch) AS epoch,
       t.created_at, coalesce(l.run_at, t.not_before) AS not_before, t.expires_at,
       coalesce(r.started_at, q.started_at) AS started_at, r.completed_at,
       coalesce(r.cancel_requested_at, q.cancel_requested_at) AS cancel_requested_at,
       coalesce(r.cancel_actor, q.cancel_actor) AS cancel_actor,
       t.actor, t.retry_of, t.run_id, t.idem_key
FROM agent_task t
LEFT JOIN agent a ON a.num = t.agent_num
LEFT JOIN agent_result r ON r.task_id = t.id
LEFT JOIN agent_queue q ON q.agent_num = t.agent_num AND q.priority = t.priority AND q.task_id = t.id
LEFT JOIN agent_later l ON l.task_id = t.id;
