package kinds_test

import (
	"encoding/json"
	"testing"

	"headgate/internal/kinds"
)

// hundredBytes is a typical submission of the load generator.
const hundredBytes = `{"n":123456,"text":"a typical piece of text","list":[1,2,3],"nested":{"ok":true,"none":null},"z":"!"}`

func BenchmarkValidateEcho100Bytes(b *testing.B) {
	benchmarkValidate(b, kinds.Echo, hundredBytes)
}

func BenchmarkValidateRun(b *testing.B) {
	benchmarkValidate(b, kinds.Run, `{"program":"append","args":{"path":"out.txt","count":3}}`)
}

func benchmarkValidate(b *testing.B, kind, args string) {
	b.Helper()
	r := kinds.Default()
	raw := json.RawMessage(args)
	b.ReportAllocs()
	for b.Loop() {
		if err := r.Validate(kind, raw); err != nil {
			b.Fatal(err)
		}
	}
}
