-- The schema of Headgate, complete from the first day. Released files are
-- never edited (a test holds their hashes): a change is a new file.
--
-- The queue is split so that nothing hot is updated in place: agent_task is the
-- intake, agent_queue holds what is not completed, agent_result what is. A task
-- has exactly one of a queue row, a later row and a result row.

-- +goose Up
SET LOCAL lock_timeout = '2s';

-- One row per fixed group of agents; owner is a random id per process start.
-- The row is locked FOR SHARE by every turn, so that a take-over waits for it.
CREATE TABLE shard_lease (
    shard      smallint    PRIMARY KEY CHECK (shard BETWEEN 0 AND 15),
    owner      uuid,
    addr       text        NOT NULL DEFAULT '',
    epoch      bigint      NOT NULL DEFAULT 0,
    expires_at timestamptz NOT NULL DEFAULT '-infinity'
) WITH (fillfactor = 10);
INSERT INTO shard_lease (shard) SELECT generate_series(0, 15);

CREATE TABLE controller (
    id         uuid        PRIMARY KEY,
    name       text        NOT NULL,
    addr       text        NOT NULL,
    version    text        NOT NULL DEFAULT '',
    started_at timestamptz NOT NULL DEFAULT now(),
    seen_at    timestamptz NOT NULL DEFAULT now()
) WITH (fillfactor = 20);

-- num is the dense key inside the queue tables; shard follows from the id.
-- A removed agent keeps its row for the history of its tasks, so that ids and
-- keys are unique only among those that are not removed.
CREATE TABLE agent (
    num          integer     GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    id           uuid        NOT NULL,
    shard        smallint    NOT NULL GENERATED ALWAYS AS ((get_byte(uuid_send(id), 15) % 16)::smallint) STORED,
    name         text        NOT NULL,
    addresses    text[]      NOT NULL DEFAULT '{}',
    labels       jsonb       NOT NULL DEFAULT '{}',
    status       text        NOT NULL CHECK (status IN ('enrolling', 'active', 'quarantined', 'removed')),
    status_why   text        NOT NULL DEFAULT '',
    status_by    text        NOT NULL DEFAULT '',
    paused_at    timestamptz,
    paused_by    text        NOT NULL DEFAULT '',
    spki         bytea       NOT NULL CHECK (octet_length(spki) = 32),
    cert_serial  text        NOT NULL DEFAULT '',
    cert_expires timestamptz,
    ledger_id    uuid,
    hostname     text        NOT NULL DEFAULT '',
    os           text        NOT NULL DEFAULT '',
    version      text        NOT NULL DEFAULT '',
    facts        json,
    facts_at     timestamptz,
    paired_at    timestamptz NOT NULL DEFAULT now(),
    paired_by    text        NOT NULL DEFAULT '',
    removed_at   timestamptz,
    revision     bigint      NOT NULL DEFAULT 1
);
CREATE UNIQUE INDEX agent_id_live ON agent (id) WHERE status <> 'removed';
CREATE UNIQUE INDEX agent_spki_live ON agent (spki) WHERE status <> 'removed';
CREATE INDEX agent_id ON agent (id);
CREATE INDEX agent_name ON agent (name text_pattern_ops);
CREATE INDEX agent_labels ON agent USING gin (labels jsonb_path_ops);

-- One nextval reserves a block of 1000 ids for a controller.
CREATE SEQUENCE agent_task_id_seq AS bigint START 1 INCREMENT BY 1000;

-- Intake, never updated.
CREATE TABLE agent_task (
    id         bigint      NOT NULL,
    created_at timestamptz NOT NULL,
    expires_at timestamptz NOT NULL,
    not_before timestamptz,
    retry_of   bigint,
    timeout_ms bigint      NOT NULL,
    agent_num  integer     NOT NULL,
    priority   smallint    NOT NULL,
    repeatable boolean     NOT NULL,
    run_id     uuid,
    kind       text        NOT NULL,
    actor      text        NOT NULL,
    idem_key   text,
    args       json        NOT NULL,
    PRIMARY KEY (id)
) PARTITION BY RANGE (id);
CREATE INDEX agent_task_agent ON agent_task (agent_num, id);
CREATE INDEX agent_task_kind ON agent_task (kind, id);
CREATE INDEX agent_task_created ON agent_task USING brin (created_at) WITH (pages_per_range = 32);
CREATE INDEX agent_task_run ON agent_task (run_id, id) WHERE run_id IS NOT NULL;

-- Every task that is not completed and is due: narrow, small, churns. No index
-- names a column that a claim changes, so that claims stay HOT; fillfactor 40
-- leaves room for them. ANALYZE is kept away: statistics taken while the queue
-- is nearly empty turn plans over, and its statements are pinned anyway.
CREATE TABLE agent_queue (
    task_id             bigint      NOT NULL,
    epoch               bigint,
    started_at          timestamptz,
    expires_at          timestamptz NOT NULL,
    cancel_requested_at timestamptz,
    agent_num           integer     NOT NULL,
    priority            smallint    NOT NULL,
    attempt             smallint    NOT NULL DEFAULT 0,
    cancel_actor        text,
    PRIMARY KEY (agent_num, priority, task_id)
) WITH (fillfactor = 40, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 20000,
        autovacuum_vacuum_cost_delay = 0, autovacuum_analyze_threshold = 2000000000);
CREATE INDEX agent_queue_expires ON agent_queue (expires_at);

-- Append only; a row here is what completed means.
CREATE TABLE agent_result (
    task_id      bigint      NOT NULL,
    epoch        bigint      NOT NULL DEFAULT 0,
    started_at   timestamptz,
    completed_at timestamptz NOT NULL,
    output_bytes bigint      NOT NULL DEFAULT 0,
    agent_num    integer     NOT NULL,
    attempt      smallint    NOT NULL DEFAULT 0,
    outcome      text        NOT NULL CHECK (outcome IN ('succeeded', 'failed', 'timed-out', 'cancelled', 'expired', 'rejected', 'unknown')),
    reason       text        NOT NULL DEFAULT '',
    detail       text        NOT NULL DEFAULT '',
    exit         json,
    result       json,
    result_bytes bytea,
    PRIMARY KEY (task_id)
) PARTITION BY RANGE (task_id);
CREATE INDEX agent_result_outcome ON agent_result (outcome, task_id) WHERE outcome <> 'succeeded';
CREATE INDEX agent_result_agent ON agent_result (agent_num, task_id);

-- What tasks printed, in chunks with a place in their stream.
CREATE TABLE task_output (
    task_id   bigint      NOT NULL,
    off       bigint      NOT NULL,
    at        timestamptz NOT NULL,
    agent_num integer     NOT NULL,
    seq       integer     NOT NULL,
    attempt   smallint    NOT NULL,
    stream    text        NOT NULL CHECK (stream IN ('stdout', 'stderr')),
    bytes     bytea       NOT NULL,
    PRIMARY KEY (task_id, attempt, seq)
) PARTITION BY RANGE (task_id);

-- Answers that came after completion: kept and shown, never a result.
CREATE TABLE late_result (
    task_id      bigint      NOT NULL,
    epoch        bigint      NOT NULL,
    started_at   timestamptz,
    received_at  timestamptz NOT NULL DEFAULT now(),
    output_bytes bigint      NOT NULL DEFAULT 0,
    agent_num    integer     NOT NULL,
    attempt      smallint    NOT NULL,
    outcome      text        NOT NULL,
    reason       text        NOT NULL DEFAULT '',
    detail       text        NOT NULL DEFAULT '',
    exit         json,
    result       json,
    result_bytes bytea,
    PRIMARY KEY (task_id, attempt, epoch)
) PARTITION BY RANGE (task_id);

-- Tasks that wait for a time: not_before and back-off.
CREATE TABLE agent_later (
    run_at     timestamptz NOT NULL,
    task_id    bigint      NOT NULL,
    expires_at timestamptz NOT NULL,
    agent_num  integer     NOT NULL,
    priority   smallint    NOT NULL,
    attempt    smallint    NOT NULL DEFAULT 0,
    PRIMARY KEY (run_at, task_id)
);
CREATE UNIQUE INDEX agent_later_task ON agent_later (task_id);
CREATE INDEX agent_later_agent ON agent_later (agent_num, task_id);
CREATE INDEX agent_later_expires ON agent_later (expires_at);

-- Idempotency keys: the same key of the same caller never makes a second task.
CREATE TABLE task_dedup (
    principal  text        NOT NULL,
    route      text        NOT NULL,
    key        text        NOT NULL,
    idx        integer     NOT NULL,
    task_id    bigint      NOT NULL,
    expires_at timestamptz NOT NULL,
    hash       bytea       NOT NULL,
    PRIMARY KEY (principal, route, key, idx)
);
CREATE INDEX task_dedup_expires ON task_dedup (expires_at);

-- A schedule fires once per due time, whoever evaluates it.
CREATE TABLE schedule_fire (
    schedule_id bigint      NOT NULL,
    due_at      timestamptz NOT NULL,
    task_id     bigint,
    run_id      uuid,
    fired_at    timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (schedule_id, due_at)
);

-- Rows that are history are never changed; retention drops whole partitions.
-- +goose StatementBegin
CREATE FUNCTION headgate_refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% of % is refused: its rows never change', TG_OP, TG_TABLE_NAME
        USING ERRCODE = 'restrict_violation';
END
$$;
-- +goose StatementEnd
CREATE TRIGGER agent_task_no_change BEFORE UPDATE OR DELETE ON agent_task
    FOR EACH ROW EXECUTE FUNCTION headgate_refuse_change();
CREATE TRIGGER agent_result_no_change BEFORE UPDATE OR DELETE ON agent_result
    FOR EACH ROW EXECUTE FUNCTION headgate_refuse_change();
CREATE TRIGGER task_output_no_change BEFORE UPDATE OR DELETE ON task_output
    FOR EACH ROW EXECUTE FUNCTION headgate_refuse_change();

-- lz4 is twice as fast as the default; a server built without it works too.
-- +goose StatementBegin
DO $$
BEGIN
    ALTER TABLE agent_task ALTER COLUMN args SET COMPRESSION lz4;
    ALTER TABLE agent_result ALTER COLUMN result SET COMPRESSION lz4;
    ALTER TABLE agent_result ALTER COLUMN result_bytes SET COMPRESSION lz4;
    ALTER TABLE late_result ALTER COLUMN result SET COMPRESSION lz4;
    ALTER TABLE task_output ALTER COLUMN bytes SET COMPRESSION lz4;
EXCEPTION WHEN feature_not_supported THEN
    RAISE NOTICE 'this server has no lz4; its default compression is used';
END
$$;
-- +goose StatementEnd

-- headgate_make_partitions makes the partitions of the four big tables that
-- hold ids up to last_id. It attaches ready tables, because CREATE TABLE ...
-- PARTITION OF would lock all readers and writers of the parent out.
-- +goose StatementBegin
CREATE FUNCTION headgate_make_partitions(last_id bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    span   CONSTANT bigint := 4194304; -- 2^22 ids
    made   integer := 0;
    parent text;
    key    text;
    child  text;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('headgate_make_partitions'));
    FOR part IN 0 .. (last_id / span)::integer LOOP
        FOREACH parent IN ARRAY ARRAY['agent_task', 'agent_result', 'task_output', 'late_result'] LOOP
            child := parent || '_p' || part;
            key := CASE parent WHEN 'agent_task' THEN 'id' ELSE 'task_id' END;
            CONTINUE WHEN to_regclass(child) IS NOT NULL;
            EXECUTE format('CREATE TABLE %I (LIKE %I INCLUDING ALL, CHECK (%I >= %s AND %I < %s))',
                child, parent, key, part * span, key, (part + 1) * span);
            EXECUTE format('ALTER TABLE %I ATTACH PARTITION %I FOR VALUES FROM (%s) TO (%s)',
                parent, child, part * span, (part + 1) * span);
            made := made + 1;
        END LOOP;
    END LOOP;
    RETURN made;
END
$$;
-- +goose StatementEnd

-- One row per task with its one state, for people and reports. Lists of the
-- product use statements of their own that start from the right index.
CREATE VIEW agent_task_view AS
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
       q.cancel_requested_at, q.cancel_actor,
       t.actor, t.retry_of, t.run_id, t.idem_key
FROM agent_task t
LEFT JOIN agent a ON a.num = t.agent_num
LEFT JOIN agent_result r ON r.task_id = t.id
LEFT JOIN agent_queue q ON q.agent_num = t.agent_num AND q.priority = t.priority AND q.task_id = t.id
LEFT JOIN agent_later l ON l.task_id = t.id;

CREATE TABLE enrolment_token (
    id          bytea       PRIMARY KEY CHECK (octet_length(id) = 8),
    secret_hash bytea       NOT NULL CHECK (octet_length(secret_hash) = 32),
    created_at  timestamptz NOT NULL DEFAULT now(),
    created_by  text        NOT NULL,
    expires_at  timestamptz NOT NULL,
    max_uses    integer     NOT NULL CHECK (max_uses > 0),
    uses        integer     NOT NULL DEFAULT 0 CHECK (uses BETWEEN 0 AND max_uses)
);

CREATE TABLE pairing (
    id         uuid        PRIMARY KEY,
    address    text        NOT NULL,
    token_id   bytea,
    agent_id   uuid,
    actor      text        NOT NULL,
    started_at timestamptz NOT NULL,
    changed_at timestamptz NOT NULL DEFAULT now(),
    state      text        NOT NULL CHECK (state IN ('running', 'paired', 'failed')),
    detail     text        NOT NULL DEFAULT ''
);
CREATE INDEX pairing_started ON pairing (started_at DESC, id);

-- Certificates of the fleet's authority; their keys are files, never rows.
CREATE TABLE ca (
    id         uuid        PRIMARY KEY,
    fleet      text        NOT NULL,
    cert_pem   text        NOT NULL,
    state      text        NOT NULL CHECK (state IN ('staged', 'active', 'retired')),
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX ca_one_active ON ca (state) WHERE state = 'active';

CREATE TABLE app_user (
    id            uuid        PRIMARY KEY,
    name          text        NOT NULL UNIQUE,
    role          text        NOT NULL,
    password_hash text,
    created_at    timestamptz NOT NULL DEFAULT now(),
    disabled_at   timestamptz
);

-- Secrets are kept as SHA-256 only, here and in the next two tables.
CREATE TABLE session (
    hash       bytea       PRIMARY KEY CHECK (octet_length(hash) = 32),
    user_id    uuid        NOT NULL REFERENCES app_user ON DELETE CASCADE,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL
);
CREATE INDEX session_of_user ON session (user_id);
CREATE INDEX session_expires ON session (expires_at);

CREATE TABLE sign_in_link (
    hash       bytea       PRIMARY KEY CHECK (octet_length(hash) = 32),
    user_id    uuid        NOT NULL REFERENCES app_user ON DELETE CASCADE,
    created_at timestamptz NOT NULL DEFAULT now(),
    expires_at timestamptz NOT NULL,
    used_at    timestamptz
);

CREATE TABLE api_token (
    id           uuid        PRIMARY KEY,
    name         text        NOT NULL,
    role         text        NOT NULL,
    hash         bytea       NOT NULL UNIQUE CHECK (octet_length(hash) = 32),
    created_at   timestamptz NOT NULL DEFAULT now(),
    created_by   text        NOT NULL DEFAULT '',
    expires_at   timestamptz,
    last_used_at timestamptz,
    revoked_at   timestamptz
);
CREATE INDEX api_token_created ON api_token (created_at DESC, id);

-- Append only; each row's hash covers the one before it.
CREATE TABLE audit (
    seq       bigint      PRIMARY KEY,
    at        timestamptz NOT NULL DEFAULT now(),
    actor     text        NOT NULL,
    action    text        NOT NULL,
    target    text        NOT NULL DEFAULT '',
    detail    json,
    prev_hash bytea       NOT NULL,
    hash      bytea       NOT NULL
);
CREATE INDEX audit_at ON audit (at);
CREATE TRIGGER audit_no_change BEFORE UPDATE OR DELETE ON audit
    FOR EACH ROW EXECUTE FUNCTION headgate_refuse_change();

CREATE TABLE setting (
    name       text        PRIMARY KEY,
    value      json        NOT NULL,
    changed_at timestamptz NOT NULL DEFAULT now(),
    changed_by text        NOT NULL DEFAULT ''
);

CREATE TABLE saved_view (
    id         uuid        PRIMARY KEY,
    user_id    uuid        NOT NULL REFERENCES app_user ON DELETE CASCADE,
    page       text        NOT NULL,
    name       text        NOT NULL,
    query      text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (user_id, page, name)
);

CREATE TABLE series (
    name  text        NOT NULL,
    at    timestamptz NOT NULL,
    value json        NOT NULL,
    PRIMARY KEY (name, at)
);
CREATE INDEX series_at ON series (at);

SELECT headgate_make_partitions(4194304);
