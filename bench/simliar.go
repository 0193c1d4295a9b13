package main

import (
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"headgate/internal/agentpb"
)

// What a simulated agent may do instead of its work, by its index.
const (
	liarDead    = iota // it ends each session at once
	liarSilent         // it greets and says nothing more
	liarTrickle        // it prints a byte at a time, for a task that nobody gave it
	liarWrong          // it answers for tasks of others, old attempts, and twice
	liarHuge           // its answer is larger than any message may be
	liarGarbage        // its messages are empty
	liarSorts
)

const (
	trickleGap = 10 * time.Millisecond
	hugeResult = 16 << 20
)

// lies says whether an agent is one of those that misbehave.
func (s *simulator) lies(a *simAgent) bool { return a.index >= len(s.agents)-s.liars }

// misbehave is the session of a liar, behind its Welcome.
func (s *simulator) misbehave(a *simAgent, stream grpc.BidiStreamingServer[agentpb.ControllerMessage, agentpb.AgentMessage]) error {
	final := func(id int64, attempt int32, result []byte) *agentpb.AgentMessage {
		return &agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Final{Final: &agentpb.Final{
			TaskId: id, Attempt: attempt, Epoch: 1, Outcome: "succeeded", Result: result,
		}}}
	}
	sort := a.index % liarSorts
	for n := 0; ; n++ {
		var say *agentpb.AgentMessage
		switch sort {
		case liarDead:
			return status.Error(codes.Unavailable, "GONE")
		case liarSilent:
			<-stream.Context().Done()
			return stream.Context().Err()
		case liarTrickle:
			if err := wait(stream.Context(), trickleGap); err != nil {
				return err
			}
			say = &agentpb.AgentMessage{Msg: &agentpb.AgentMessage_Output{Output: &agentpb.Output{
				TaskId: s.lastTask.Load(), Attempt: 1, Seq: int32(n), Offset: int64(n), Stream: agentpb.Stream_STREAM_STDOUT, Data: []byte("x"), //nolint:gosec // a session is shorter than that
			}}}
		case liarWrong:
			say = final(s.lastTask.Load(), int32(n%3), nil) //nolint:gosec // 0 to 2
		case liarHuge:
			say = final(s.lastTask.Load(), 1, make([]byte, hugeResult))
		default:
			say = &agentpb.AgentMessage{}
		}
		if err := stream.Send(say); err != nil {
			return err
		}
	}
}
