// Package history writes down what happened in a run of many processes, and
// judges afterwards whether the promises were kept.
//
// Each process writes a file of its own, one JSON object a line, with the time
// of CLOCK_MONOTONIC: on one machine the times of all files can be compared.
// Agents (or the programs that they run) write the start and the end of every
// execution themselves; that is the truth about effects, whatever anybody else
// believes. Check reads all files and gives a Report whose violations are
// sentences with the lines that prove them.
//
//	w, err := history.Open("client-1.jsonl")
//	op := w.Submit(history.Submission{Agent: agent, Key: "k1"})
//	w.Acked(op, id, 202)        // or w.Unanswered(op, err.Error())
//	w.Start(history.Run{Agent: agent, ID: id, Attempt: 1, Epoch: 7})
//	w.End(history.Run{Agent: agent, ID: id, Attempt: 1}, "succeeded")
//	report, err := history.Check(files, history.Options{})
//
// The rules, by the promises that they check (docs/promises.md):
//
//	lost      P1  acknowledged, and missing in the final dump or not completed
//	doubled   P1  two tasks of one key or answer, one task twice in the dump, more tasks than submissions
//	slot      P2  two executions at once on one agent
//	order     P3  acknowledged before the other was sent, and started after it
//	once      P4  a task of delivery once that began twice
//	repeat    P5  succeeded without having run; one attempt that began twice; what ran is on no disk
//	final     P6  a completed task that changed, by the shadow table or by what readers saw
//	waiter    P7  not exactly one terminal event, or one that was not so
//	epoch     P2  an agent that obeyed a lower epoch after a higher one
//	liveness  P12 something still waits, or began, too long after the last fault had healed
package history
