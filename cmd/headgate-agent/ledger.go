package main

import (
	"encoding/json"
	"path/filepath"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"headgate/internal/agent/ledger"
)

// dumped is one line of a dump. Orders count the accepts and finishes of this
// ledger from 1 and never repeat, so that order and overlap can be read from
// them without trusting a clock.
type dumped struct {
	TaskID        string     `json:"task_id"`
	Attempt       int32      `json:"attempt"`
	Kind          string     `json:"kind"`
	Delivery      string     `json:"delivery"`
	Epoch         int64      `json:"epoch"`
	State         string     `json:"state"`
	AcceptedOrder uint64     `json:"accepted_order"`
	DoneOrder     uint64     `json:"done_order,omitempty"`
	AcceptedAt    time.Time  `json:"accepted_at"`
	StartedAt     *time.Time `json:"started_at"`
	DoneAt        *time.Time `json:"done_at"`
	Outcome       string     `json:"outcome,omitempty"`
	Reason        string     `json:"reason,omitempty"`
}

func newLedger() *cobra.Command {
	cmd := &cobra.Command{Use: "ledger", Short: "Read the agent's record of tasks", Args: noArgs}
	var dir string
	dump := &cobra.Command{
		Use: "dump", Short: "Print the ledger as JSON lines in the order of acceptance", Args: noArgs,
		Long: "Prints one JSON object a line for each attempt of a task, also while the agent runs. Besides what the\n" +
			"controller has not yet forgotten these are the newest 100,000 of all others.",
		RunE: func(cmd *cobra.Command, _ []string) error {
			_, entries, err := ledger.Read(filepath.Join(dir, "ledger"))
			if err != nil {
				return err
			}
			out := json.NewEncoder(cmd.OutOrStdout())
			for _, e := range entries {
				if err := out.Encode(dumpedOf(e)); err != nil {
					return err
				}
			}
			return nil
		},
	}
	dataFlag(dump.Flags(), &dir)
	cmd.AddCommand(dump)
	return cmd
}

func dumpedOf(e *ledger.Entry) dumped {
	d := dumped{
		TaskID: strconv.FormatInt(e.TaskID, 10), Attempt: e.Attempt, Kind: e.Kind, Delivery: "repeatable", Epoch: e.Epoch,
		State: string(e.State()), AcceptedOrder: e.AcceptedOrder, DoneOrder: e.DoneOrder,
		AcceptedAt: time.Unix(0, e.AcceptedAt).UTC(), Outcome: e.Outcome, Reason: e.Reason,
	}
	if e.Once {
		d.Delivery = "once"
	}
	if e.Done {
		started, done := time.Unix(0, e.StartedAt).UTC(), time.Unix(0, e.EndedAt).UTC()
		d.StartedAt, d.DoneAt = &started, &done
	}
	return d
}
