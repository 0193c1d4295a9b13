package handlers

import (
	"encoding/json"
	"encoding/json/jsontext"
	jsonv2 "encoding/json/v2"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"headgate/internal/fault"
	"headgate/internal/kinds"
	"headgate/tasks"
)

// maxDepth is how deep args may be nested; deeper ones only exist to hurt
// those who read them.
const maxDepth = 32

// SubmitBody is one task as a client asks for it.
type SubmitBody struct {
	Agent     string          `json:"agent" validate:"required"` // id or unique name
	Kind      string          `json:"kind" validate:"required"`
	Args      json.RawMessage `json:"args"`                                         // as the kind's schema says; {} if missing
	Timeout   string          `json:"timeout" example:"30s"`                        // the kind's if missing
	Priority  *int            `json:"priority" minimum:"0" maximum:"9" example:"5"` // lower first
	NotBefore *time.Time      `json:"not_before"`
	ExpiresAt *time.Time      `json:"expires_at"`                       // 24 h from now if missing
	Delivery  string          `json:"delivery" enums:"once,repeatable"` // may only turn a repeatable kind into once
} //	@name	TaskSubmission

// BatchBody is many tasks as a client asks for them.
type BatchBody struct {
	Tasks batchTasks `json:"tasks" validate:"required"`
} //	@name	TaskBatch

// batchTasks stops reading at the first task too many, so that the memory for
// an endless list is never asked for.
type batchTasks []SubmitBody

// UnmarshalJSONFrom implements json.UnmarshalerFrom.
func (b *batchTasks) UnmarshalJSONFrom(dec *jsontext.Decoder) error {
	if dec.PeekKind() != '[' {
		return &jsonv2.SemanticError{JSONKind: dec.PeekKind(), GoType: reflect.TypeFor[[]SubmitBody]()}
	}
	if _, err := dec.ReadToken(); err != nil {
		return err
	}
	for dec.PeekKind() != ']' {
		if len(*b) == tasks.MaxBatch {
			return fault.Newf(fault.TooLarge, "batch_too_large", "A batch holds at most %d tasks.", tasks.MaxBatch).
				WithHint("Send the rest in another call.").WithField("/tasks", "at most "+strconv.Itoa(tasks.MaxBatch)+" items")
		}
		*b = append(*b, SubmitBody{})
		if err := jsonv2.UnmarshalDecode(dec, &(*b)[len(*b)-1]); err != nil {
			return err
		}
	}
	_, err := dec.ReadToken()
	return err
}

// submission checks what needs no look at agents and kinds. prefix is the
// pointer of the task within the body.
func (b *SubmitBody) submission(prefix string) (tasks.Submission, error) {
	var wrong []fault.Field
	note := func(field, detail string) {
		wrong = append(wrong, fault.Field{Pointer: prefix + "/" + field, Detail: detail})
	}
	sub := tasks.Submission{Agent: b.Agent, Kind: b.Kind, Args: b.Args, Priority: b.Priority, Delivery: kinds.Delivery(b.Delivery)}
	checkName(note, "agent", b.Agent)
	checkName(note, "kind", b.Kind)
	if depth(b.Args) > maxDepth {
		note("args", "is nested deeper than "+strconv.Itoa(maxDepth)+" levels")
	}
	if b.Timeout != "" {
		d, err := time.ParseDuration(b.Timeout)
		if err != nil || d <= 0 {
			note("timeout", "must be a positive duration such as 30s, 5m or 1h30m")
		}
		sub.Timeout = d
	}
	if b.Priority != nil && (*b.Priority < tasks.MinPriority || *b.Priority > tasks.MaxPriority) {
		note("priority", "must be a whole number from 0 (first) to 9 (last)")
	}
	if b.Delivery != "" && sub.Delivery != kinds.DeliveryOnce && sub.Delivery != kinds.DeliveryRepeatable {
		note("delivery", "must be once or repeatable")
	}
	if b.NotBefore != nil {
		sub.NotBefore = b.NotBefore.UTC()
	}
	if b.ExpiresAt != nil {
		sub.ExpiresAt = b.ExpiresAt.UTC()
	}
	if wrong != nil {
		return sub, invalidFields(wrong)
	}
	return sub, nil
}

// checkName refuses text that cannot be the name of anything here.
func checkName(note func(field, detail string), field, text string) {
	switch {
	case text == "":
		note(field, "is missing")
	case strings.ContainsRune(text, 0):
		note(field, "holds a NUL character (\\u0000), which no name here has")
	case !validText(text):
		note(field, "holds bytes that are not UTF-8")
	}
}

// invalidFields makes one sentence of the first wrong field and lists all.
func invalidFields(wrong []fault.Field) error {
	first := wrong[0]
	f := fault.Newf(fault.Invalid, "invalid_field", "The field %s %s.", strings.TrimPrefix(first.Pointer, "/"), first.Detail)
	f.Fields = wrong
	if len(wrong) > 1 {
		f.Hint = "There are " + strconv.Itoa(len(wrong)) + " wrong fields; each is listed in errors."
	}
	return f
}

// depth gives how deep JSON text is nested. The text is known to be valid.
func depth(text []byte) int {
	deepest, now := 0, 0
	inString := false
	for i := 0; i < len(text); i++ {
		c := text[i]
		switch {
		case inString && c == '\\':
			i++
		case c == '"':
			inString = !inString
		case inString:
		case c == '{' || c == '[':
			now++
			deepest = max(deepest, now)
		case c == '}' || c == ']':
			now--
		}
	}
	return deepest
}

func validText(text string) bool { return utf8.ValidString(text) }
