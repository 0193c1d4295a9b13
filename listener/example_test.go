package listener_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"

	"headgate/listener"
)

func Example() {
	ctx := context.Background()
	l, err := listener.New(ctx, listener.Config{
		Controller: listener.PortConfig{Addr: "127.0.0.1:0"},
		Public:     listener.PortConfig{Addr: "127.0.0.1:0"},
		OpenDelay:  0, // listener.DefaultOpenDelay outside of an example
	})
	if err != nil {
		fmt.Println(err)
		return
	}
	srv := &http.Server{
		ConnContext: listener.ConnContext,
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			info, _ := listener.InfoFrom(r.Context())
			fmt.Fprintf(w, "hello from the %s port", info.Port)
		}),
	}
	ended := make(chan error, 1)
	go func() { ended <- srv.Serve(l) }()

	show := func(addr string) {
		client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := client.Get("http://" + addr)
		if err != nil {
			fmt.Println("refused")
			return
		}
		defer resp.Body.Close()
		b, _ := io.ReadAll(resp.Body)
		fmt.Println(string(b))
	}
	public := l.Ports().Public[0].String() // known before it opens
	show(l.Addr().String())
	show(public)

	l.MarkStable("called myself successfully")
	if _, err := l.WaitPublic(ctx); err != nil {
		fmt.Println(err)
		return
	}
	show(public)

	_ = l.Drain(ctx)
	_ = srv.Shutdown(ctx)
	if err := <-ended; errors.Is(err, net.ErrClosed) || errors.Is(err, http.ErrServerClosed) {
		fmt.Println("served to the end") // the first when Drain was quicker than Shutdown
	}
	// Output:
	// hello from the controller port
	// refused
	// hello from the public port
	// served to the end
}
