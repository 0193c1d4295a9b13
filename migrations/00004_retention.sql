-- Retention drops partitions, which must not be made again: from now on new
-- ones are made only behind the newest there is. Programs of before this file
-- call the same function.

-- +goose Up
SET LOCAL lock_timeout = '2s';

-- +goose StatementBegin
CREATE OR REPLACE FUNCTION headgate_make_partitions(last_id bigint) RETURNS integer LANGUAGE plpgsql AS $$
DECLARE
    span   CONSTANT bigint := 4194304; -- 2^22 ids
    made   integer := 0;
    first  bigint;
    parent text;
    key    text;
    child  text;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtext('headgate_make_partitions'));
    SELECT coalesce(max(substring(c.relname FROM '_p([0-9]+)$')::bigint) + 1, 0) INTO first
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'agent_task'::regclass;
    FOR part IN first .. last_id / span LOOP
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
