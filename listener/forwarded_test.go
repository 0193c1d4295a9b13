package listener_test

import (
	"fmt"
	"io"
	"net/http"
	"sync"
	"testing"
	"time"

	"headgate/listener"
)

// Acceptance 47. What a client writes into X-Forwarded-For makes it no other
// source: all of its connections use up one bucket.
func TestForwardedHeadersAreNotRead(t *testing.T) {
	t.Parallel()
	const burst = 3
	l := start(t, func(c *listener.Config) {
		c.Limits.SourceRate = listener.Rate{PerSecond: 0.001, Burst: burst} // no other in this test's life
		c.Limits.QueueWait = 50 * time.Millisecond
	})
	server := &http.Server{
		ConnContext: listener.ConnContext, ReadHeaderTimeout: patience,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			info, _ := listener.InfoFrom(r.Context())
			_, _ = io.WriteString(w, info.Source.String())
		}),
	}
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(l) })
	t.Cleanup(func() { _ = server.Close(); wg.Wait() })
	address := open(t, l)
	// A connection for each request.
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
	get := func(n int) (string, error) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://"+address, nil)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"X-Forwarded-For", "X-Real-Ip", "True-Client-Ip"} {
			req.Header.Set(name, fmt.Sprintf("203.0.113.%d", n))
		}
		req.Header.Set("Forwarded", fmt.Sprintf("for=203.0.113.%d", n))
		res, err := client.Do(req)
		if err != nil {
			return "", err
		}
		defer res.Body.Close()
		body, err := io.ReadAll(res.Body)
		return string(body), err
	}
	for n := range burst {
		if source, err := get(n); err != nil || source != "127.0.0.1" {
			t.Fatalf("request %d: source %q, %v; want 127.0.0.1", n, source, err)
		}
	}
	if source, err := get(burst); err == nil {
		t.Errorf("one more connection than the source may is served, as source %q", source)
	}
	if top := l.Status().Admission.Top; len(top) != 1 || top[0].Source != "127.0.0.1" || top[0].Refused == 0 {
		t.Errorf("sources are %+v", top)
	}
}
