package kinds

import (
	"bytes"
	"encoding/json"
	"encoding/json/jsontext"
	"errors"
	"io"
	"strconv"
	"strings"

	"headgate/internal/fault"
)

const (
	// MaxArgsSize is the most bytes that the arguments of one task may have.
	MaxArgsSize = 1 << 20
	// MaxArgsDepth is how deep objects and arrays may lie in each other; the
	// arguments' own object is level 1. Readers that recurse stay safe.
	MaxArgsDepth = 64
	// maxNumberText and maxExponent bound numbers where a schema compares
	// them: exact arithmetic on 1e999999 would cost a machine's memory.
	maxNumberText = 64
	maxExponent   = 400
	// argsPointer is where arguments lie in a submission.
	argsPointer = "/args"
)

// Validate says whether args are acceptable arguments for the kind of that
// name. They must be one JSON object (empty text is refused; "{}" says "none")
// of valid UTF-8 with no member name twice, within the limits above. The
// arguments themselves are never changed, so numbers of any size, the order of
// members and escapes, \u0000 included, reach the agent as they were written.
// A fault has the code unknown_kind or invalid_args, or is of kind TooLarge.
func (r *Registry) Validate(name string, args json.RawMessage) error {
	k, err := r.Lookup(name)
	if err != nil {
		return err
	}
	return k.Validate(args)
}

// Validate is Registry.Validate for a kind already at hand.
func (k *Kind) Validate(args json.RawMessage) error {
	if len(args) > MaxArgsSize {
		return fault.Newf(fault.TooLarge, CodeInvalidArgs, "The arguments have %d bytes; at most %d are allowed.", len(args), MaxArgsSize).
			WithField(argsPointer, "is too large")
	}
	if k.anyObject && plainlyGood(args) {
		return nil
	}
	if err := scan(args, !k.anyObject); err != nil || k.anyObject {
		return err
	}
	return k.checkSchema(args)
}

// plainlyGood recognises the usual argument object of a kind without a schema
// of its own at a fraction of the cost of scan. When it says no, scan decides.
func plainlyGood(args json.RawMessage) bool {
	v := jsontext.Value(args)
	opened := bytes.Count(args, []byte{'{'}) + bytes.Count(args, []byte{'['})
	return opened <= MaxArgsDepth && v.Kind() == '{' && v.IsValid()
}

// scan reads args once, token by token.
func scan(args json.RawMessage, limitNumbers bool) error {
	// A bytes.Buffer is the one reader from which the decoder need not copy.
	d := jsontext.NewDecoder(bytes.NewBuffer(args))
	if kind := d.PeekKind(); kind != '{' {
		return notAnObject(d, kind)
	}
	for {
		token, err := d.ReadToken()
		if errors.Is(err, io.EOF) && d.StackDepth() == 0 {
			return nil
		}
		if err != nil {
			return syntaxFault(err)
		}
		switch token.Kind() {
		case '{', '[':
			if d.StackDepth() > MaxArgsDepth {
				return invalid(pointer(d.StackPointer()), "lies deeper than "+strconv.Itoa(MaxArgsDepth)+" levels")
			}
		case '0':
			if limitNumbers && !plainNumber(token.String()) {
				return invalid(pointer(d.StackPointer()), "is a number with too many digits or too large an exponent")
			}
		}
		if d.StackDepth() == 0 {
			return nothingFollows(d)
		}
	}
}

func nothingFollows(d *jsontext.Decoder) error {
	if _, err := d.ReadToken(); !errors.Is(err, io.EOF) {
		return invalid(argsPointer, "is followed by more text after the object's end")
	}
	return nil
}

func notAnObject(d *jsontext.Decoder, kind jsontext.Kind) error {
	names := map[jsontext.Kind]string{'[': "an array", '"': "a string", '0': "a number", 't': "true", 'f': "false", 'n': "null"}
	_, err := d.ReadToken() // the kind is a guess from the first byte
	switch {
	case err == nil:
		return invalid(argsPointer, "must be an object, not "+names[kind])
	case errors.Is(err, io.EOF):
		return invalid(argsPointer, "is empty; write {} for no arguments")
	}
	return syntaxFault(err)
}

// syntaxFault puts what the decoder found into words.
func syntaxFault(err error) error {
	s, ok := errors.AsType[*jsontext.SyntacticError](err)
	if !ok {
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
			return invalid(argsPointer, "ends in the middle of a value")
		}
		return invalid(argsPointer, "is not valid JSON")
	}
	at := pointer(s.JSONPointer)
	switch {
	case errors.Is(s.Err, jsontext.ErrDuplicateName):
		return invalid(at, "is given twice; each member name may occur once in an object")
	case errors.Is(s.Err, io.ErrUnexpectedEOF):
		return invalid(at, "ends in the middle of a value")
	case strings.Contains(s.Err.Error(), "UTF-8") || strings.Contains(s.Err.Error(), "surrogate"):
		return invalid(at, "contains text that is not valid Unicode at byte "+strconv.FormatInt(s.ByteOffset, 10))
	}
	return invalid(at, "is not valid JSON at byte "+strconv.FormatInt(s.ByteOffset, 10)+": "+s.Err.Error())
}

// plainNumber says whether exact arithmetic on the number is cheap.
func plainNumber(text string) bool {
	if len(text) > maxNumberText {
		return false
	}
	i := strings.IndexAny(text, "eE")
	if i < 0 {
		return true
	}
	exponent, err := strconv.Atoi(text[i+1:])
	return err == nil && -maxExponent <= exponent && exponent <= maxExponent
}

func pointer(p jsontext.Pointer) string { return argsPointer + string(p) }

// invalid is the fault with one wrong place; its message can stand alone.
func invalid(at, detail string) *fault.Error {
	return fault.New(fault.Invalid, CodeInvalidArgs, "The arguments are not acceptable: "+at+" "+detail+".").WithField(at, detail)
}
