package store

import (
	"strings"

	"github.com/jmoiron/sqlx"
)

// turnShape says which parts a turn has. A turn is one statement composed of
// the parts that are present: an absent part would still cost the executor its
// start, which is felt when a turn carries one task.
type turnShape uint8

const (
	withInserts turnShape = 1 << iota
	withKeys              // some insert has an idempotency key
	withOps               // rows of agent_queue are probed: finish, requeue, claim, cancel
	withFinishes
	withOutput
	withRare // due tasks, finishes in agent_later, back-off: everything is in
)

// wholeTurn has every part; all rare turns use it, so that the number of
// prepared statements stays small.
const wholeTurn = withInserts | withKeys | withOps | withFinishes | withOutput | withRare

func (s turnShape) has(p turnShape) bool { return s&p != 0 }

// Numbers of what is done to a row of agent_queue.
const (
	opFinish       = 1
	opRequeue      = 2
	opClaim        = 3
	opCancel       = 4
	opRequeueLater = 5
)

// The parts of the turn. Each begins with what the turn brings as arrays,
// probes its rows by key one after the other (LATERAL ... LIMIT 1, in key
// order), and names them by ctid from then on. The planner has no other way
// through it, whatever it believes about the size of the queue.
//
// Every part waits for `held`: the lease rows are locked before anything else.
// They are the lock of all queue rows of their shards, since nothing but a turn
// writes those. Rows of agent_queue are therefore not locked one by one, which
// would cost a tenth of the turn; a row that changed all the same would be
// missed by its ctid, and the counts at the end would not agree.
const (
	turnLease = `WITH lease AS MATERIALIZED (
    SELECT l.shard
    FROM unnest(?::smallint[], ?::bigint[]) v (shard, epoch)
    CROSS JOIN LATERAL (
        SELECT l.shard FROM shard_lease l
        WHERE l.shard = v.shard AND l.owner = ?::uuid AND l.epoch = v.epoch AND l.expires_at > clock_timestamp()
        LIMIT 1 FOR SHARE) l
), held AS MATERIALIZED (
    SELECT count(*) = ?::bigint AS ok FROM lease
)`

	turnInserts = `, ins AS MATERIALIZED (
    SELECT v.*, CASE WHEN v.started THEN now() END AS started_at
    FROM unnest(?::bigint[], ?::integer[], ?::bigint[], ?::text[], ?::text[], ?::boolean[], ?::smallint[], ?::bigint[],
                ?::bigint[], ?::bigint[], ?::bigint[], ?::text[], ?::bigint[], ?::text[], ?::text[],
                ?::boolean[], ?::boolean[], ?::boolean[])
         v (id, agent_num, epoch, kind, args, repeatable, priority, timeout_ms,
            created, not_before, expires, actor, retry_of, run_id, idem_key,
            started, later, keyed)
    WHERE (SELECT ok FROM held)
)`

	turnKeys = `, kept AS (
    INSERT INTO task_dedup (principal, route, key, idx, task_id, hash, expires_at)
    SELECT v.principal, v.route, v.key, v.idx, v.task_id, v.hash,
        CASE WHEN v.lasting THEN 'infinity' ELSE now() + interval '24 hours' END
    FROM unnest(?::text[], ?::text[], ?::text[], ?::integer[], ?::bigint[], ?::bytea[], ?::boolean[])
         v (principal, route, key, idx, task_id, hash, lasting)
    WHERE (SELECT ok FROM held)
    ON CONFLICT (principal, route, key, idx) DO UPDATE
    SET task_id = EXCLUDED.task_id, hash = EXCLUDED.hash, expires_at = EXCLUDED.expires_at
    WHERE task_dedup.expires_at <= now()
    RETURNING task_id
), fresh AS MATERIALIZED (
    SELECT * FROM ins WHERE NOT keyed OR id IN (SELECT task_id FROM kept)
)`

	turnNoKeys = `, fresh AS NOT MATERIALIZED (SELECT * FROM ins)`

	turnStore = `, new_task AS (
    INSERT INTO agent_task (id, agent_num, kind, args, repeatable, priority, timeout_ms,
        created_at, not_before, expires_at, actor, retry_of, run_id, idem_key)
    SELECT id, agent_num, kind, args::json, repeatable, priority, timeout_ms,
        to_timestamp(created / 1000000::float8),
        CASE WHEN not_before <> 0 THEN to_timestamp(not_before / 1000000::float8) END,
        to_timestamp(expires / 1000000::float8), actor, nullif(retry_of, 0), nullif(run_id, '')::uuid, nullif(idem_key, '')
    FROM fresh
), new_queue AS (
    INSERT INTO agent_queue (agent_num, priority, task_id, epoch, attempt, started_at, expires_at)
    SELECT agent_num, priority, id, CASE WHEN started THEN epoch END, started::integer, started_at,
        to_timestamp(expires / 1000000::float8)
    FROM fresh WHERE NOT later
), new_later AS (
    INSERT INTO agent_later (run_at, task_id, agent_num, priority, expires_at)
    SELECT to_timestamp(not_before / 1000000::float8), id, agent_num, priority, to_timestamp(expires / 1000000::float8)
    FROM fresh WHERE later
)`

	turnOpsNarrow = `, op AS MATERIALIZED (
    SELECT v.*, q.ct, q.started_at, q.expires_at
    FROM unnest(?::integer[], ?::smallint[], ?::bigint[], ?::smallint[], ?::smallint[], ?::bigint[], ?::bigint[], ?::text[])
         v (agent_num, priority, task_id, op, attempt, seen_epoch, new_epoch, actor)`

	turnOpsWide = `, op AS MATERIALIZED (
    SELECT v.*, q.ct, q.started_at, q.expires_at, q.cancel_requested_at, q.cancel_actor
    FROM unnest(?::integer[], ?::smallint[], ?::bigint[], ?::smallint[], ?::smallint[], ?::bigint[], ?::bigint[], ?::text[],
                ?::text[], ?::text[], ?::text[], ?::text[], ?::text[], ?::bytea[], ?::bigint[], ?::bigint[])
         v (agent_num, priority, task_id, op, attempt, seen_epoch, new_epoch, actor,
            outcome, reason, detail, exit, result, result_bytes, output_bytes, run_at)`

	// seen_epoch: 0 = has not started, -1 = started under whatever epoch.
	turnProbe = `
    CROSS JOIN LATERAL (
        SELECT q.ctid AS ct, q.started_at, q.expires_at, q.cancel_requested_at, q.cancel_actor FROM agent_queue q
        WHERE q.agent_num = v.agent_num AND q.priority = v.priority AND q.task_id = v.task_id
          AND q.attempt = v.attempt
          AND CASE v.seen_epoch WHEN 0 THEN q.started_at IS NULL
                                WHEN -1 THEN q.started_at IS NOT NULL
                                ELSE q.started_at IS NOT NULL AND q.epoch = v.seen_epoch END
        LIMIT 1) q
    WHERE (SELECT ok FROM held)
), updated AS (
    UPDATE agent_queue q
    SET started_at = CASE op.op WHEN 2 THEN NULL WHEN 3 THEN now() ELSE q.started_at END,
        epoch = CASE op.op WHEN 2 THEN NULL WHEN 3 THEN op.new_epoch ELSE q.epoch END,
        attempt = CASE op.op WHEN 3 THEN q.attempt + 1 ELSE q.attempt END,
        cancel_requested_at = CASE op.op WHEN 2 THEN NULL WHEN 4 THEN coalesce(q.cancel_requested_at, now()) ELSE q.cancel_requested_at END,
        cancel_actor = CASE op.op WHEN 2 THEN NULL WHEN 4 THEN coalesce(q.cancel_actor, op.actor) ELSE q.cancel_actor END
    FROM op
    WHERE q.ctid = op.ct AND op.op IN (2, 3, 4)
    RETURNING q.task_id
)`

	// The mark of a cancellation goes from the queue to the result; who ends a
	// task that has not started comes with the turn.
	turnFinishes = `, deleted AS (
    DELETE FROM agent_queue WHERE ctid = ANY (ARRAY(SELECT ct FROM op WHERE op IN (1, 5)))
    RETURNING task_id
), result AS (
    INSERT INTO agent_result (task_id, agent_num, outcome, reason, detail, exit, result, result_bytes,
        output_bytes, started_at, completed_at, attempt, epoch, cancel_requested_at, cancel_actor)
    SELECT task_id, agent_num, outcome, reason, detail, nullif(exit, '')::json, nullif(result, '')::json,
        nullif(result_bytes, ''), output_bytes, started_at, now(), attempt, seen_epoch,
        coalesce(cancel_requested_at, CASE WHEN actor <> '' THEN now() END), coalesce(cancel_actor, nullif(actor, ''))
    FROM op WHERE op = 1
)`

	turnOutput = `, printed AS (
    INSERT INTO task_output (task_id, attempt, seq, agent_num, stream, off, at, bytes)
    SELECT task_id, attempt, seq, agent_num, stream, off, to_timestamp(at / 1000000::float8), substr(?::bytea, first, size)
    FROM unnest(?::bigint[], ?::smallint[], ?::integer[], ?::integer[], ?::text[], ?::bigint[], ?::bigint[], ?::integer[], ?::integer[])
         v (task_id, attempt, seq, agent_num, stream, off, at, first, size)
    WHERE (SELECT ok FROM held)
    ON CONFLICT (task_id, attempt, seq) DO NOTHING
)`

	turnRare = `, later_again AS (
    INSERT INTO agent_later (run_at, task_id, agent_num, priority, attempt, expires_at)
    SELECT to_timestamp(run_at / 1000000::float8), task_id, agent_num, priority, attempt, expires_at
    FROM op WHERE op = 5
), due AS MATERIALIZED (
    SELECT l.*
    FROM unnest(?::bigint[], ?::bigint[]) v (task_id, run_at)
    CROSS JOIN LATERAL (
        SELECT l.ctid AS ct, l.task_id, l.agent_num, l.priority, l.attempt, l.expires_at FROM agent_later l
        WHERE l.task_id = v.task_id AND l.run_at = to_timestamp(v.run_at / 1000000::float8)
        LIMIT 1 FOR UPDATE) l
    WHERE (SELECT ok FROM held)
), moved AS (
    INSERT INTO agent_queue (agent_num, priority, task_id, attempt, expires_at)
    SELECT agent_num, priority, task_id, attempt, expires_at FROM due
), ended AS MATERIALIZED (
    SELECT v.*, l.ct
    FROM unnest(?::bigint[], ?::smallint[], ?::integer[], ?::text[], ?::text[], ?::text[], ?::text[], ?::text[], ?::text[], ?::bytea[], ?::bigint[])
         v (task_id, attempt, agent_num, actor, outcome, reason, detail, exit, result, result_bytes, output_bytes)
    CROSS JOIN LATERAL (
        SELECT l.ctid AS ct FROM agent_later l
        WHERE l.task_id = v.task_id AND l.agent_num = v.agent_num AND l.attempt = v.attempt
        LIMIT 1 FOR UPDATE) l
    WHERE (SELECT ok FROM held)
), ended_result AS (
    INSERT INTO agent_result (task_id, agent_num, outcome, reason, detail, exit, result, result_bytes,
        output_bytes, completed_at, attempt, cancel_requested_at, cancel_actor)
    SELECT task_id, agent_num, outcome, reason, detail, nullif(exit, '')::json, nullif(result, '')::json,
        nullif(result_bytes, ''), output_bytes, now(), attempt, CASE WHEN actor <> '' THEN now() END, nullif(actor, '')
    FROM ended
), later_deleted AS (
    DELETE FROM agent_later WHERE ctid = ANY (ARRAY(SELECT ct FROM due UNION ALL SELECT ct FROM ended))
    RETURNING task_id
)`
)

// The columns of the answer: lists by number of op, in the order asked.
const (
	answerHead     = "\nSELECT (SELECT ok FROM held) AS ok, now() AS at"
	answerInserted = ",\n    ARRAY(SELECT id FROM fresh) AS inserted"
	answerOps      = ",\n    ARRAY(SELECT op FROM op) AS ops, ARRAY(SELECT task_id FROM op) AS op_ids,\n    (SELECT count(*) FROM updated)"
	answerDeleted  = " + (SELECT count(*) FROM deleted)"
	answerTouched  = " AS touched"
	answerRare     = ",\n    ARRAY(SELECT task_id FROM due) AS moved, ARRAY(SELECT task_id FROM ended) AS ended,\n    (SELECT count(*) FROM later_deleted) AS later_touched"
)

// sql composes the statement of a shape, with parameters in the order of its
// parts.
func (s turnShape) sql() string {
	var b strings.Builder
	b.WriteString(turnLease)
	if s.has(withInserts) {
		b.WriteString(turnInserts)
		if s.has(withKeys) {
			b.WriteString(turnKeys)
		} else {
			b.WriteString(turnNoKeys)
		}
		b.WriteString(turnStore)
	}
	switch {
	case s.has(withFinishes):
		b.WriteString(turnOpsWide + turnProbe + turnFinishes)
	case s.has(withOps):
		b.WriteString(turnOpsNarrow + turnProbe)
	}
	if s.has(withOutput) {
		b.WriteString(turnOutput)
	}
	if s.has(withRare) {
		b.WriteString(turnRare)
	}
	b.WriteString(answerHead)
	if s.has(withInserts) {
		b.WriteString(answerInserted)
	}
	if s.has(withOps) {
		b.WriteString(answerOps)
		if s.has(withFinishes) {
			b.WriteString(answerDeleted)
		}
		b.WriteString(answerTouched)
	}
	if s.has(withRare) {
		b.WriteString(answerRare)
	}
	return sqlx.Rebind(sqlx.DOLLAR, b.String())
}

// turnShapes lists every shape that a turn can have.
func turnShapes() []turnShape {
	var all []turnShape
	for _, ins := range []turnShape{0, withInserts, withInserts | withKeys} {
		for _, ops := range []turnShape{0, withOps, withOps | withFinishes} {
			for _, out := range []turnShape{0, withOutput} {
				all = append(all, ins|ops|out)
			}
		}
	}
	return append(all, wholeTurn)
}
