package zmtp_test

import (
	"context"
	"encoding/binary"
	"fmt"

	"github.com/kvatlas/kvatlas/internal/ingest/zmtp"
	"github.com/kvatlas/kvatlas/tools/zmtpserver"
)

// ExampleDialSub receives from a publisher. The first message marks the beginning of the connection: earlier messages
// of the publisher are not available from this socket.
func ExampleDialSub() {
	ctx := context.Background()
	pub, err := zmtpserver.ListenPub(ctx, "tcp://*:0", zmtp.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer pub.Stop()
	sub, err := zmtp.DialSub(ctx, pub.Addr(), []string{"kv@"}, zmtp.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer sub.Stop()
	if err := pub.WaitSubscribers(ctx, 1); err != nil {
		fmt.Println(err)
		return
	}
	_ = pub.Send([]byte("kv@pod"), binary.BigEndian.AppendUint64(nil, 0), []byte("payload"))
	for range 2 {
		m, err := sub.Recv(ctx)
		fmt.Printf("%v %q %v\n", m.Kind, m.Frames, err)
	}
	// Output:
	// opened [] <nil>
	// data ["kv@pod" "\x00\x00\x00\x00\x00\x00\x00\x00" "payload"] <nil>
}

// ExampleDialDealer sends a request to a router, as for a replay: two frames, the first of them empty.
func ExampleDialDealer() {
	ctx := context.Background()
	router, err := zmtpserver.ListenRouter(ctx, "tcp://*:0", zmtp.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer router.Stop()
	dealer, err := zmtp.DialDealer(ctx, router.Addr(), zmtp.Config{})
	if err != nil {
		fmt.Println(err)
		return
	}
	defer dealer.Stop()
	_ = dealer.Send(ctx, nil, []byte("from 5"))
	from, asked, _ := router.Recv(ctx)
	_ = router.Send(from, nil, []byte("five"))
	reply, err := dealer.Recv(ctx)
	fmt.Printf("%q %q %v\n", asked, reply, err)
	// Output:
	// ["" "from 5"] ["" "five"] <nil>
}
