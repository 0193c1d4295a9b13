package agent

import (
	"context"
	"encoding/json"
	"time"
)

// ping answers at once.
type ping struct{ version string }

func (p ping) Execute(context.Context, Task) Ending {
	return succeed(map[string]any{"version": p.version, "clock": time.Now().UTC().Format(time.RFC3339Nano)})
}

// echo gives its arguments back, byte for byte.
type echo struct{}

func (echo) Execute(_ context.Context, t Task) Ending {
	return Ending{Outcome: succeeded, Result: t.Args}
}

// sleep keeps the slot for a while.
type sleep struct{}

func (sleep) Execute(ctx context.Context, t Task) Ending {
	var args struct {
		Seconds float64 `json:"seconds"`
	}
	if err := json.Unmarshal(t.Args, &args); err != nil {
		return Ending{Outcome: rejected, Reason: "invalid_args", Detail: "The number of seconds cannot be read."}
	}
	timer := time.NewTimer(time.Duration(args.Seconds * float64(time.Second)))
	defer timer.Stop()
	select {
	case <-timer.C:
		return succeed(map[string]any{"slept_seconds": args.Seconds})
	case <-ctx.Done():
		return endingOf(ctx)
	}
}

// succeed gives a result made of plain values.
func succeed(result any) Ending {
	b, err := json.Marshal(result)
	if err != nil {
		return Ending{Outcome: failed, Reason: reasonDefect, Detail: "The result cannot be written as JSON: " + err.Error()}
	}
	return Ending{Outcome: succeeded, Result: b}
}
