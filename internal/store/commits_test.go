package store

import (
	"encoding/json"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"uuid"

	"headgate/internal/auth"
	"headgate/internal/fault"
	"headgate/internal/fleet"
	"headgate/internal/testkit"
	"headgate/tasks"
)

// lostWrite is one write of the product, to be told twice that it was lost:
// once before its commit arrived, once after.
type lostWrite struct {
	name string
	do   func(r *rig) error
	// effect gives a number that do changes by delta, however often it was tried.
	effect string
	delta  int
	// skip is how many commits come before the one that is lost.
	skip int
	// setup puts there what the write needs.
	setup string
	// moves says that a part of the effect stays though the write did not take
	// place: a sequence does not go back with its transaction.
	moves bool
}

func (w lostWrite) prepare(t *testing.T, d *DB) {
	t.Helper()
	if w.setup == "" {
		return
	}
	if _, err := d.general.Exec(w.setup); err != nil {
		t.Fatalf("%s: %v", w.name, err)
	}
}

// lostWrites lists every write beside turns, in an order in which each finds
// what it needs.
func lostWrites(r *rig) []lostWrite {
	return slices.Concat(writesOfPeople(), writesOfAgents(r), writesOfControllers(r), writesOfUpkeep(r))
}

func writesOfPeople() []lostWrite {
	var user auth.User
	token := auth.Token{ID: uuid.New(), Name: "ci", Role: auth.Viewer, Hash: [32]byte{1}}
	session, link := [32]byte{2}, [32]byte{3}
	soon := time.Now().Add(time.Hour)
	return []lostWrite{
		{name: "user", effect: `SELECT count(*) FROM app_user`, delta: 1, do: func(r *rig) (err error) {
			user, err = r.EnsureUser(r.tb.Context(), "anna", auth.Viewer)
			return err
		}},
		{name: "token", effect: `SELECT count(*) FROM api_token`, delta: 1, do: func(r *rig) error {
			_, err := r.EnsureToken(r.tb.Context(), token)
			return err
		}},
		{name: "token used", effect: `SELECT count(*) FROM api_token WHERE last_used_at IS NOT NULL`, delta: 1, do: func(r *rig) error {
			return r.TouchTokens(r.tb.Context(), map[uuid.UUID]time.Time{token.ID: time.Now()})
		}},
		{name: "token revoked", effect: `SELECT count(*) FROM api_token WHERE revoked_at IS NOT NULL`, delta: 1, do: func(r *rig) error {
			return r.RevokeToken(r.tb.Context(), token.ID)
		}},
		{name: "session", effect: `SELECT count(*) FROM session`, delta: 1, do: func(r *rig) error {
			return r.InsertSession(r.tb.Context(), auth.Session{Hash: session, User: user, ExpiresAt: soon})
		}},
		{name: "session ended", effect: `SELECT count(*) FROM session`, delta: -1, do: func(r *rig) error {
			return r.DeleteSession(r.tb.Context(), session)
		}},
		{name: "sign-in link", effect: `SELECT count(*) FROM sign_in_link`, delta: 1, do: func(r *rig) error {
			return r.InsertSignInLink(r.tb.Context(), link, user.ID, soon)
		}},
		{name: "sign-in link used", effect: `SELECT count(*) FROM sign_in_link WHERE used_at IS NOT NULL`, delta: 1, do: func(r *rig) error {
			u, err := r.UseSignInLink(r.tb.Context(), link)
			if err == nil && u.ID != user.ID {
				return fmt.Errorf("the link is of %s, want %s", u.ID, user.ID)
			}
			return err
		}},
	}
}

func writesOfAgents(r *rig) []lostWrite {
	ctx := r.tb.Context()
	id := uuid.New()
	enrolment := fleet.EnrolmentToken{ID: [8]byte{1}, SecretHash: [32]byte{1}, ExpiresAt: time.Now().Add(time.Hour), MaxUses: 5}
	pairing := fleet.Pairing{ID: uuid.New(), Address: "127.0.0.1:1", StartedAt: time.Now(), State: "running"}
	name := "renamed"
	agents := func(where string) string { return `SELECT count(*) FROM agent WHERE ` + where }
	return []lostWrite{
		{name: "authority", effect: `SELECT count(*) FROM ca`, delta: 1, do: func(r *rig) error {
			mine, err := r.InsertCA(ctx, fleet.CA{ID: uuid.New(), Fleet: "f", CertPEM: "x"})
			if err == nil && !mine {
				return fmt.Errorf("the authority is said to be another one")
			}
			return err
		}},
		{name: "enrolment token", effect: `SELECT count(*) FROM enrolment_token`, delta: 1, do: func(r *rig) error {
			return r.InsertEnrolmentToken(ctx, enrolment)
		}},
		{name: "enrolment token used", effect: `SELECT sum(uses) FROM enrolment_token`, delta: 1, do: func(r *rig) error {
			return r.UseEnrolmentToken(ctx, enrolment.ID, enrolment.SecretHash)
		}},
		{name: "enrolment token given back", effect: `SELECT sum(uses) FROM enrolment_token`, delta: -1, do: func(r *rig) error {
			return r.ReturnEnrolmentToken(ctx, enrolment.ID)
		}},
		{name: "pairing", effect: `SELECT count(*) FROM pairing`, delta: 1, do: func(r *rig) error {
			return r.RecordPairing(ctx, pairing)
		}},
		{name: "agent", effect: agents(`status = 'enrolling'`), delta: 1, do: func(r *rig) error {
			_, err := r.InsertAgent(ctx, fleet.Agent{ID: id, Name: "new", SPKI: [32]byte{9}})
			return err
		}},
		{name: "agent confirmed", effect: agents(`status = 'enrolling'`), delta: -1, do: func(r *rig) error {
			_, err := r.ConfirmAgent(ctx, id)
			return err
		}},
		{name: "agent changed", effect: `SELECT sum(revision) FROM agent`, delta: 1, do: func(r *rig) error {
			_, err := r.ChangeAgent(ctx, id, fleet.Change{Name: &name}, "user:x")
			return err
		}},
		{name: "agent seen", effect: agents(`hostname = 'host'`), delta: 1, do: func(r *rig) error {
			return r.SetSeen(ctx, r.agents[0].Num, r.leaseOf(r.agents[0]), uuid.New(), "v1", "host", "linux")
		}},
		{name: "agent's facts", effect: agents(`facts_at IS NOT NULL`), delta: 1, do: func(r *rig) error {
			return r.SetFacts(ctx, r.agents[0].Num, json.RawMessage(`{}`), time.Now())
		}},
		{name: "agent removed", effect: agents(`status = 'removed'`), delta: 1, do: func(r *rig) error {
			_, err := r.SetStatus(ctx, id, fleet.Removed, "test", "user:x")
			return err
		}},
		{name: "enrolments dropped", effect: agents(`name = 'half'`), delta: -1, do: func(r *rig) error {
			return r.DropEnrolling(ctx, time.Now().Add(time.Hour))
		}, setup: `INSERT INTO agent (id, name, addresses, labels, status, spki, paired_by)
			VALUES (gen_random_uuid(), 'half', '{}', '{}', 'enrolling', decode(repeat('ab', 32), 'hex'), '')`},
	}
}

func writesOfControllers(r *rig) []lostWrite {
	ctx := r.tb.Context()
	c := Controller{ID: uuid.New(), Name: "one", Addr: "127.0.0.1:1"}
	other := tasks.Owner{ID: uuid.New(), Addr: "127.0.0.1:2"}
	var held []tasks.Lease
	epochs := `SELECT sum(epoch) FROM shard_lease`
	return []lostWrite{
		{name: "controller", effect: `SELECT count(*) FROM controller`, delta: 1, do: func(r *rig) error {
			return r.RegisterController(ctx, c, nil)
		}},
		{name: "heartbeat", effect: `SELECT count(*) FROM controller WHERE stable_at IS NOT NULL`, delta: 1, do: func(r *rig) error {
			_, err := r.Heartbeat(ctx, c.ID, true)
			return err
		}},
		{name: "controller left", effect: `SELECT count(*) FROM controller`, delta: -1, do: func(r *rig) error {
			return r.Unregister(ctx, c.ID)
		}},
		{name: "leases taken", effect: epochs, delta: tasks.NumShards, do: func(r *rig) (err error) {
			held, err = r.Acquire(ctx, other, idsOf(r.me), allShards())
			return err
		}},
		{name: "leases renewed", effect: `SELECT count(*) FROM shard_lease WHERE addr = '127.0.0.1:3'`, delta: tasks.NumShards, do: func(r *rig) error {
			moved := other
			moved.Addr = "127.0.0.1:3"
			l, err := r.Renew(ctx, moved, held)
			if err == nil && len(l) != len(held) {
				return fmt.Errorf("renewed %d of %d leases", len(l), len(held))
			}
			return err
		}},
		{name: "leases given back", effect: `SELECT count(*) FROM shard_lease WHERE owner IS NULL`, delta: tasks.NumShards, do: func(r *rig) error {
			return r.Release(ctx, other, held)
		}},
	}
}

func writesOfUpkeep(r *rig) []lostWrite {
	ctx := r.tb.Context()
	upkeep := func(r *rig) error {
		_, err := r.Upkeep(ctx)
		return err
	}
	skipped := int64(0)
	late := r.finish(r.insert(r.agents[0], true), 1)
	late.Ending.Outcome = tasks.Failed
	return []lostWrite{
		{name: "series", effect: `SELECT count(*) FROM series WHERE name = 'lost'`, delta: 1, do: func(r *rig) error {
			return r.SavePoints(ctx, []tasks.Point{{Name: "lost", At: time.Now(), Value: json.RawMessage(`1`)}})
		}},
		{name: "late answer", effect: `SELECT count(*) FROM late_result`, delta: 1, do: func(r *rig) error {
			late.ID = tasks.ID(r.count(`SELECT min(task_id) FROM agent_result`))
			late.Attempt, late.Epoch = 7, 7
			_, err := r.RecordLate(ctx, []tasks.Finish{late})
			return err
		}},
		{
			name: "keys dropped", effect: `SELECT count(*) FROM task_dedup`, delta: -1, do: upkeep,
			setup: `INSERT INTO task_dedup (principal, route, key, idx, task_id, expires_at, hash)
			  VALUES ('x', 'POST /tasks', 'k', 0, 1, now() - interval '1 hour', decode(repeat('ab', 32), 'hex'))`,
		},
		{
			name: "retries dropped", effect: `SELECT count(*) FROM task_dedup`, delta: -1, skip: 1, do: upkeep,
			setup: `INSERT INTO task_dedup (principal, route, key, idx, task_id, expires_at, hash)
			  VALUES ('', 'retry', '0', 0, 1, 'infinity', decode(repeat('ab', 32), 'hex'))`,
		},
		{
			name: "sessions dropped", effect: `SELECT count(*) FROM session`, delta: -1, skip: 2, do: upkeep,
			setup: `INSERT INTO session (hash, user_id, expires_at)
			  SELECT decode(repeat('cd', 32), 'hex'), min(id::text)::uuid, now() - interval '2 days' FROM app_user`,
		},
		{
			name: "links dropped", effect: `SELECT count(*) FROM sign_in_link`, delta: -1, skip: 3, do: upkeep,
			setup: `INSERT INTO sign_in_link (hash, user_id, expires_at)
			  SELECT decode(repeat('cd', 32), 'hex'), min(id::text)::uuid, now() - interval '2 days' FROM app_user`,
		},
		{
			name: "series dropped", effect: `SELECT count(*) FROM series`, delta: -1, skip: 4, do: upkeep,
			setup: `INSERT INTO series (name, at, value) VALUES ('old', now() - interval '40 days', '1')`,
		},
		{name: "partitions made", effect: `SELECT count(*) FROM pg_inherits WHERE inhparent = 'agent_task'::regclass`, delta: 3, do: func(r *rig) error {
			return r.ensurePartitions(ctx, 3*partitionSpan)
		}},
		{name: "ids skipped", effect: `SELECT (last_value + 1000) / 4194304 FROM agent_task_id_seq`, delta: 2, moves: true, do: func(r *rig) error {
			if err := r.ensurePartitions(ctx, 3*partitionSpan); err != nil {
				return err
			}
			skipped++
			_, err := r.skipTo(ctx, skipped*partitionSpan)
			return err
		}},
		{name: "epochs raised", effect: `SELECT max(epoch) FROM shard_lease`, delta: epochLeap, do: func(r *rig) error {
			_, err := r.RaiseEpochs(ctx)
			return err
		}},
		{name: "partition marked", effect: `SELECT count(*) FROM pg_inherits WHERE inhparent = 'late_result'::regclass`, delta: -1, do: func(r *rig) error {
			return r.dropPartition(ctx, Partition{Number: 1})
		}},
	}
}

// lostRig is a store behind a proxy with a completed task.
func lostRig(t *testing.T) (*rig, *DB, *testkit.Proxy) {
	t.Helper()
	d, direct, p := behindProxy(t)
	r := rigOn(t, d, 1)
	a := r.agents[0]
	in := r.insert(a, true)
	r.turn(&tasks.Turn{Inserts: []tasks.Insert{in}})
	r.turn(&tasks.Turn{Finishes: []tasks.Finish{r.finish(in, 1)}})
	return r, direct, p
}

// TestEveryWriteSurvivesALostCommit loses the commit of each write of the
// product by name: when it never arrived, nothing is there and the caller is
// told so; when its answer was lost, the write is settled by asking and its
// effect is there once.
//
// Cases R23, R24.
func TestEveryWriteSurvivesALostCommit(t *testing.T) {
	t.Parallel()
	for name, how := range hows() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r, direct, p := lostRig(t)
			for _, w := range lostWrites(r) {
				w.prepare(t, direct)
				before := countOn(t, direct, w.effect)
				lost := p.Arm(&testkit.Fault{Match: commitText, Before: true, How: how, Skip: w.skip})
				if err := w.do(r); fault.KindOf(err) != fault.Unavailable || fault.CodeOf(err) != "commit_lost" {
					t.Errorf("%s: a commit that never arrived gave %v, want commit_lost", w.name, err)
				}
				if n := countOn(t, direct, w.effect); n != before && !w.moves {
					t.Errorf("%s: a commit that never arrived changed %d to %d", w.name, before, n)
				}
				f := p.Arm(&testkit.Fault{Match: commitText, How: how, Skip: w.skip})
				if err := w.do(r); err != nil {
					t.Errorf("%s: the answer to its commit was lost: %v", w.name, err)
				}
				if len(lost.Hits()) != 1 || len(f.Hits()) != 1 {
					t.Fatalf("%s: the proxy broke %d and %d commits, want one each", w.name, len(lost.Hits()), len(f.Hits()))
				}
				if n := countOn(t, direct, w.effect); n != before+w.delta {
					t.Errorf("%s: the effect went from %d to %d, want %+d", w.name, before, n, w.delta)
				}
			}
			checkInvariant(t, direct)
		})
	}
}

var (
	writeText = regexp.MustCompile(`(?i)\b(insert|update|delete|truncate|create|alter|drop|comment|vacuum|reindex|nextval|headgate_make_partitions)\b`)
	lockText  = regexp.MustCompile(`(?i)\bfor (no key )?update\b`)
)

// writes says whether a statement changes anything.
func writes(text string) bool { return writeText.MatchString(lockText.ReplaceAllString(text, "")) }

// harmless are writes outside a transaction block, with the reason why a driver
// that runs them twice does no harm.
var harmless = map[string]string{
	sqlNextIDs:              "a block of ids is skipped",
	vacuumQueue:             "it frees what is dead",
	"REINDEX INDEX":         "it is built anew twice",
	"DROP INDEX":            "IF EXISTS",
	"DROP TABLE IF EXISTS":  "IF EXISTS",
	"ALTER TABLE":           "a partition that is detached cannot be detached again",
	"DEALLOCATE":            "of a session",
	"SELECT pg_notify($1, ": "a hint",
}

// TestEveryWriteIsTried records what the writes above and all turns execute. A
// new statement that writes fails it until there is a case for it, and so does
// one outside a transaction block, where the driver may repeat it by itself.
//
// Cases R23.
func TestEveryWriteIsTried(t *testing.T) {
	t.Parallel()
	r, direct, p := lostRig(t)
	for _, turn := range lostTurns(r) {
		r.turn(turn())
	}
	for _, w := range lostWrites(r) {
		w.prepare(t, direct)
		if err := w.do(r); err != nil {
			t.Fatalf("%s: %v", w.name, err)
		}
	}
	if err := r.tendQueue(t.Context(), tendLimits{dead: -1}); err != nil {
		t.Fatal(err)
	}
	seen := p.Statements()
	for name, text := range stringConsts(t) {
		if writes(text) && seen[text] == 0 {
			t.Errorf("no case executes %s: add one to lostWrites", name)
		}
	}
	all := strings.Join(slices.Collect(maps.Keys(seen)), "\n")
	for name, part := range map[string]string{
		"turnStore": turnStore, "turnKeys": turnKeys, "turnFinishes": turnFinishes, "turnOutput": turnOutput, "turnRare": turnRare,
	} {
		if tail := part[strings.LastIndex(part, "?")+1:]; !strings.Contains(all, tail) {
			t.Errorf("no turn executes %s: add one to lostTurns", name)
		}
	}
	for text := range p.Autocommitted() {
		if writes(text) && !slices.ContainsFunc(slices.Collect(maps.Keys(harmless)), func(h string) bool { return strings.HasPrefix(text, h) }) {
			t.Errorf("executed outside a transaction, where the driver may run it twice: %s", text)
		}
	}
}
