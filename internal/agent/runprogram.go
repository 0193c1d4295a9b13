package agent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"headgate/internal/agent/policy"
	"headgate/internal/agent/program"
	"headgate/internal/agentpb"
)

// searchPath is the PATH of every program; the agent's own is not inherited.
const searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// runProgram is cmd.run: it runs programs that the policy names.
type runProgram struct {
	policy    *policy.Policy
	termGrace time.Duration
	stopGrace time.Duration
}

func (r *runProgram) Execute(ctx context.Context, t Task) Ending {
	var args struct {
		Program string         `json:"program"`
		Args    map[string]any `json:"args"`
	}
	d := json.NewDecoder(bytes.NewReader(t.Args))
	d.UseNumber()
	if err := d.Decode(&args); err != nil {
		return Ending{Outcome: rejected, Reason: "invalid_args", Detail: "The arguments cannot be read."}
	}
	entry, err := r.policy.Program(args.Program)
	if err != nil {
		return rejection(err)
	}
	argv, err := entry.Arguments(args.Args)
	if err != nil {
		return rejection(err)
	}
	if err := entry.CheckFile(); err != nil {
		end := rejection(err)
		if end.Reason == reasonSpawn { // the file is missing, not mistrusted
			end.Outcome = failed
			end.Exit = &agentpb.Exit{SpawnError: err.Error()}
		}
		return end
	}
	// The policy may allow less time than the task asks for.
	limited, stop := context.WithTimeout(ctx, entry.Timeout)
	defer stop()
	out := &limitedOutput{sink: t.Output, limit: entry.MaxOutput}
	result := program.Run(limited, program.Command{
		Path: entry.Path, Args: argv, Dir: entry.Cwd, User: entry.User,
		Env: environment(entry, t), Sink: out, Grace: r.grace,
	})
	return r.ending(limited, entry, args.Program, result, out)
}

// grace is shorter when the whole agent is to end within five seconds.
func (r *runProgram) grace(cause error) time.Duration {
	if errors.Is(cause, errStopping) {
		return r.stopGrace
	}
	return r.termGrace
}

func environment(p *policy.Program, t Task) []string {
	env := map[string]string{"PATH": searchPath, "LANG": "C.UTF-8"}
	maps.Copy(env, p.Env)
	env["HEADGATE_TASK_ID"] = strconv.FormatInt(t.ID, 10)
	env["HEADGATE_ATTEMPT"] = strconv.FormatInt(int64(t.Attempt), 10)
	var list []string
	for _, key := range slices.Sorted(maps.Keys(env)) {
		list = append(list, key+"="+env[key])
	}
	return list
}

func (r *runProgram) ending(ctx context.Context, p *policy.Program, name string, res program.Result, out *limitedOutput) Ending {
	if res.SpawnError != nil {
		return Ending{
			Outcome: failed, Reason: reasonSpawn, Exit: &agentpb.Exit{SpawnError: res.SpawnError.Error()},
			Detail: "The program " + p.Path + " could not be started: " + res.SpawnError.Error() + ".",
		}
	}
	exit := &agentpb.Exit{
		Signal: res.Signal, UserMs: res.User.Milliseconds(), SystemMs: res.System.Milliseconds(), MaxRssBytes: res.MaxRSS,
	}
	if res.Code != nil {
		code := int32(*res.Code)
		exit.Code = &code
	}
	end := Ending{Outcome: succeeded}
	switch {
	case res.Ended:
		end = endingOf(ctx)
		end.Detail += " The program ended " + how(res) + "."
	case res.Signal != "":
		end = Ending{Outcome: failed, Reason: reasonSignal, Detail: "The program was killed by " + res.Signal + "."}
	case !p.Succeeded(*res.Code):
		end = Ending{Outcome: failed, Reason: reasonExit, Detail: fmt.Sprintf("The program ended with exit code %d.", *res.Code)}
	}
	if dropped := out.dropped.Load(); dropped > 0 {
		end.Detail = sentence(end.Detail, fmt.Sprintf("Of its output the last %d bytes were dropped: the policy allows %d bytes.", dropped, p.MaxOutput))
	}
	if res.Cut {
		end.Detail = sentence(end.Detail, "A process that it left behind held its output open and was cut off.")
	}
	stdout, stderr := out.printed[0].Load(), out.printed[1].Load()
	end.Result = succeed(map[string]any{
		"program": name, "exit_code": res.Code, "stdout_bytes": stdout, "stderr_bytes": stderr, "truncated": out.dropped.Load() > 0,
	}).Result
	end.Exit = exit
	return end
}

func how(r program.Result) string {
	if r.Signal != "" {
		return "by " + r.Signal
	}
	return fmt.Sprintf("with exit code %d", *r.Code)
}

func sentence(text, more string) string {
	if text == "" {
		return more
	}
	return text + " " + more
}

// limitedOutput passes on what the policy allows and counts all.
type limitedOutput struct {
	sink    program.Sink
	limit   int64
	printed [2]atomic.Int64
	kept    atomic.Int64
	dropped atomic.Int64
}

func (o *limitedOutput) Write(s program.Stream, p []byte) {
	o.printed[s-program.Stdout].Add(int64(len(p)))
	room := o.limit - (o.kept.Add(int64(len(p))) - int64(len(p)))
	if over := int64(len(p)) - max(room, 0); over > 0 {
		o.kept.Add(-over)
		o.dropped.Add(over)
		p = p[:int64(len(p))-over]
	}
	if len(p) > 0 {
		o.sink.Write(s, p)
	}
}

func (o *limitedOutput) Unblock() { o.sink.Unblock() }
