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
	"strings"
	"sync/atomic"
	"time"

	"headgate/internal/agent/policy"
	"headgate/internal/agent/program"
	"headgate/internal/agentpb"
)

// The environment of every program; the agent's own is not inherited.
const (
	searchPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
	// machineZone means the time zone of the machine, whatever the agent's is.
	machineZone = ":/etc/localtime"
)

// runProgram is cmd.run: it runs programs that the policy names.
type runProgram struct {
	policy    *policy.Policy
	keeper    *program.Keeper
	termGrace time.Duration
	stopGrace time.Duration
}

// runArgs are the arguments of cmd.run.
type runArgs struct {
	Program string         `json:"program"`
	Args    map[string]any `json:"args"`
	// Grace is a wish for less than the policy allows.
	Grace *float64 `json:"grace_seconds"`
}

func (r *runProgram) Execute(ctx context.Context, t Task) Ending {
	var args runArgs
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
	as, err := program.Lookup(entry.User, entry.Group, entry.Groups)
	if err != nil {
		return notStarted(entry, err)
	}
	// The policy may allow less time than the task asks for.
	limited, stop := context.WithTimeout(ctx, entry.Timeout)
	defer stop()
	out := &printed{Output: t.Output}
	out.Limit(entry.MaxOutput)
	result := r.keeper.Run(limited, program.Command{
		Path: entry.Path, Args: argv, Dir: entry.Cwd, As: as, Umask: entry.UmaskOr(program.DefaultUmask),
		Env: environment(entry, as, t), Sink: out, Grace: r.grace(entry, args.Grace),
		Label: labelOf(t.ID, t.Attempt), LeaveChildren: entry.LeaveChildren,
	})
	return ending(limited, entry, args.Program, result, out)
}

// grace is what the policy gives, or less if the task wishes so. It is shorter
// when the whole agent is to end within five seconds.
func (r *runProgram) grace(p *policy.Program, wish *float64) func(cause error) time.Duration {
	d := r.termGrace
	if p.Grace != nil {
		d = *p.Grace
	}
	if wish != nil {
		d = min(d, time.Duration(*wish*float64(time.Second)))
	}
	return func(cause error) time.Duration {
		if errors.Is(cause, errStopping) {
			return min(d, r.stopGrace)
		}
		return d
	}
}

// environment gives the documented minimum, what the policy adds or changes,
// and which task it is.
func environment(p *policy.Program, as program.Identity, t Task) []string {
	env := map[string]string{
		"PATH": searchPath, "LANG": "C.UTF-8", "TZ": machineZone, "HOME": as.Home, "USER": as.Name, "LOGNAME": as.Name,
	}
	maps.Copy(env, p.Env)
	env["HEADGATE_TASK_ID"] = strconv.FormatInt(t.ID, 10)
	env["HEADGATE_ATTEMPT"] = strconv.FormatInt(int64(t.Attempt), 10)
	var list []string
	for _, key := range slices.Sorted(maps.Keys(env)) {
		list = append(list, key+"="+env[key])
	}
	return list
}

func notStarted(p *policy.Program, err error) Ending {
	return Ending{
		Outcome: failed, Reason: reasonSpawn, Exit: &agentpb.Exit{SpawnError: err.Error()},
		Detail: "The program " + p.Path + " could not be started: " + err.Error() + ".",
	}
}

func ending(ctx context.Context, p *policy.Program, name string, res program.Result, out *printed) Ending {
	if res.SpawnError != nil {
		return notStarted(p, res.SpawnError)
	}
	end := Ending{Outcome: succeeded}
	switch {
	case res.Ended:
		end = endingOf(ctx)
		end.Detail += " " + how(res)
	case res.Signal != "":
		end = Ending{Outcome: failed, Reason: reasonSignal, Detail: "The program was killed by " + res.Signal + ", which was not requested here."}
	case res.Code != nil && !p.Succeeded(*res.Code):
		end = Ending{Outcome: failed, Reason: reasonExit, Detail: fmt.Sprintf("The program ended with exit code %d.", *res.Code)}
	}
	end.Detail = sentence(end.Detail, remains(res))
	stdout, stderr := out.bytes[0].Load(), out.bytes[1].Load()
	_, dropped := out.End()
	end.Result = succeed(map[string]any{
		"program": name, "exit_code": res.Code, "stdout_bytes": stdout, "stderr_bytes": stderr, "truncated": dropped > 0,
	}).Result
	end.Exit = exitOf(res)
	return end
}

// exitOf gives the end of a program as the controller is told it.
func exitOf(res program.Result) *agentpb.Exit {
	exit := &agentpb.Exit{
		Signal: res.Signal, UserMs: res.User.Milliseconds(), SystemMs: res.System.Milliseconds(), MaxRssBytes: res.MaxRSS,
		KilledBy: res.KilledBy, GraceMs: res.Grace.Milliseconds(), Released: res.Released,
		LeftBehind: processesOf(res.LeftBehind), Survivors: processesOf(res.Survivors),
	}
	if res.Code != nil {
		code := int32(*res.Code)
		exit.Code = &code
	}
	return exit
}

// mostProcesses bounds a list of processes in a result.
const mostProcesses = 20

func processesOf(list []program.Process) []*agentpb.Process {
	var all []*agentpb.Process
	for _, p := range list[:min(len(list), mostProcesses)] {
		all = append(all, &agentpb.Process{Pid: int32(p.PID), Name: strings.ToValidUTF8(p.Name, "\uFFFD")})
	}
	return all
}

// how says how a program that was ended by us took it.
func how(r program.Result) string {
	signal := "SIGTERM"
	if r.KilledBy == program.ByKill {
		signal = fmt.Sprintf("SIGTERM and, %s later, SIGKILL", r.Grace)
	}
	switch {
	case r.Signal != "":
		return fmt.Sprintf("The program ended by %s after %s.", r.Signal, signal)
	case r.Code != nil:
		return fmt.Sprintf("The program ended with exit code %d after %s.", *r.Code, signal)
	default:
		return fmt.Sprintf("The program did not end after %s: the kernel does not let it go.", signal)
	}
}

// remains says what the program has left behind, "" when that is nothing.
func remains(r program.Result) string {
	text := ""
	switch {
	case len(r.LeftBehind) > 0 && r.Released:
		text = "It left behind " + listed(r.LeftBehind) + ", which the policy lets go on."
	case len(r.LeftBehind) > 0:
		text = "It left behind " + listed(r.LeftBehind) + ", which was ended."
	}
	if len(r.Survivors) > 0 {
		text = sentence(text, "Alive in spite of SIGKILL: "+listed(r.Survivors)+".")
	}
	if r.Cut {
		text = sentence(text, "Somebody still held its output open and was cut off.")
	}
	return text
}

// listed names the first of some processes and counts the rest.
func listed(list []program.Process) string {
	const most = 3
	var names []string
	for _, p := range list[:min(len(list), most)] {
		names = append(names, fmt.Sprintf("%s (%d)", p.Name, p.PID))
	}
	text := strings.Join(names, ", ")
	if more := len(list) - most; more > 0 {
		text += fmt.Sprintf(" and %d more", more)
	}
	return text
}

func sentence(text, more string) string {
	if text == "" || more == "" {
		return text + more
	}
	return text + " " + more
}

// printed passes on what is printed and counts it by stream.
type printed struct {
	Output
	bytes [2]atomic.Int64
}

// Write implements program.Sink.
func (o *printed) Write(s program.Stream, p []byte) {
	o.bytes[s-program.Stdout].Add(int64(len(p)))
	o.Output.Write(s, p)
}
