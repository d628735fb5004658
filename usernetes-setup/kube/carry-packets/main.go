// SPDX-License-Identifier: LGPL-3.0-or-later

// Command carry-packets joins the networks of a cluster's nodes, each in a network namespace that
// sees nothing of its machine's network: what pods send to other nodes goes through WireGuard, in
// user space, so that it needs no privilege, and nobody on the way can read or forge it.
//
//	carry-packets NODE.json TUN UDP
//
// TUN is the descriptor of the device that the node's routes lead to, UDP that of a socket of the
// machine's network, which stays there although this process is inside.
//
// Peers are known by whoever invited them: on the control node they are in a file, which is looked
// at before they can begin, since WireGuard that is not heard at once waits for 5 s. From there the
// others ask, through WireGuard itself, for who else there is, and by which address the control node
// hears them; the answer comes when it is another than the last.
package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/net/ipv4"
	"golang.zx2c4.com/wireguard/conn"
	"golang.zx2c4.com/wireguard/device"
	"golang.zx2c4.com/wireguard/tun"
)

const (
	glance = 100 * time.Millisecond // between looks whether the file of peers is another
	look   = time.Second            // between looks by which address peers are heard, and after a failure
	hold   = 30 * time.Second       // the longest that a question stays without an answer
)

// node is what this one knows when it starts. Keys are hexadecimal.
type node struct {
	Key     string `json:"key"`
	Public  string `json:"public"`
	MTU     int    `json:"mtu"`
	Ask     string `json:"ask"`               // where the control node answers who there is
	Peers   string `json:"peers,omitempty"`   // the file of peers, on the control node
	Control *peer  `json:"control,omitempty"` // on all others
}

type peer struct {
	Public   string   `json:"public"`
	Endpoint string   `json:"endpoint,omitempty"` // address and port of its socket, if known
	Networks []string `json:"networks"`           // its own address, and its pods'
}

// answer is the list of all peers, and its number.
type answer struct {
	Number int    `json:"number"`
	Peers  []peer `json:"peers"`
}

func main() {
	if len(os.Args) != 4 {
		fmt.Fprintln(os.Stderr, "carry-packets: call it as carry-packets NODE.json TUN UDP")
		os.Exit(2)
	}
	if err := run(os.Args[1], os.Args[2], os.Args[3]); err != nil {
		fmt.Fprintf(os.Stderr, "carry-packets: %v\n", err)
		os.Exit(1)
	}
}

func run(file, tunnel, socket string) error {
	var own node
	if err := read(file, &own); err != nil {
		return err
	}
	inside, err := inherited(tunnel)
	if err != nil {
		return err
	}
	link, err := tun.CreateTUNFromFile(inside, own.MTU)
	if err != nil {
		return err
	}
	outside, err := inherited(socket)
	if err != nil {
		return err
	}
	packets, err := net.FilePacketConn(outside)
	if err != nil {
		return err
	}
	udp, isUDP := packets.(*net.UDPConn)
	if !isUDP {
		return fmt.Errorf("descriptor %s is no UDP socket", socket)
	}
	known := device.NewDevice(link, &bind{udp: udp}, device.NewLogger(device.LogLevelError, ""))
	if err := known.IpcSet("private_key=" + own.Key); err != nil {
		return err
	}
	if err := known.Up(); err != nil {
		return err
	}
	peers := &peers{device: known, self: own.Public, there: map[string]peer{}}
	if own.Control == nil {
		return answerAll(own, peers)
	}
	if err := peers.set([]peer{*own.Control}, "persistent_keepalive_interval=25\n"); err != nil {
		return err
	}
	peers.kept = own.Control.Public
	return askOn(own, peers)
}

func inherited(number string) (*os.File, error) {
	descriptor, err := strconv.Atoi(number)
	if err != nil {
		return nil, fmt.Errorf("%q is no descriptor", number)
	}
	return os.NewFile(uintptr(descriptor), number), nil
}

func read(file string, into any) error {
	text, err := os.ReadFile(file)
	if err == nil {
		err = json.Unmarshal(text, into)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return nil
}

// peers are those that the device has.
type peers struct {
	device *device.Device
	self   string
	kept   string // the control node's, which no list names
	there  map[string]peer
}

// set tells the device of peers that are new, or have another address or network, with `more` lines.
func (p *peers) set(wanted []peer, more string) error {
	var text strings.Builder
	for _, one := range wanted {
		if one.Public == p.self || same(p.there[one.Public], one) {
			continue
		}
		fmt.Fprintf(&text, "public_key=%s\nreplace_allowed_ips=true\n", one.Public)
		if one.Endpoint != "" {
			fmt.Fprintf(&text, "endpoint=%s\n", one.Endpoint)
		}
		for _, network := range one.Networks {
			fmt.Fprintf(&text, "allowed_ip=%s\n", network)
		}
		text.WriteString(more)
	}
	for public := range p.there {
		gone := !slices.ContainsFunc(wanted, func(one peer) bool { return one.Public == public })
		if gone && public != p.kept {
			fmt.Fprintf(&text, "public_key=%s\nremove=true\n", public)
			delete(p.there, public)
		}
	}
	if text.Len() == 0 {
		return nil
	}
	if err := p.device.IpcSet(text.String()); err != nil {
		return err
	}
	for _, one := range wanted {
		p.there[one.Public] = one
	}
	return nil
}

func same(one, other peer) bool {
	return one.Public == other.Public && one.Endpoint == other.Endpoint &&
		slices.Equal(one.Networks, other.Networks)
}

// heard is by which address the device hears each peer.
func (p *peers) heard() (map[string]string, error) {
	text, err := p.device.IpcGet()
	if err != nil {
		return nil, err
	}
	found, public := map[string]string{}, ""
	for line := range strings.Lines(text) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), "=")
		switch name {
		case "public_key":
			public = value
		case "endpoint":
			found[public] = value
		}
	}
	return found, nil
}

// list is the control node's list of peers, for which others wait.
type list struct {
	sync.Mutex
	answer
	other chan struct{} // closed when there is another one
}

func answerAll(own node, peers *peers) error {
	listener, err := net.Listen("tcp", own.Ask)
	if err != nil {
		return err
	}
	current := &list{other: make(chan struct{})}
	go func() {
		fmt.Fprintf(os.Stderr, "carry-packets: %v\n", http.Serve(listener, current))
		os.Exit(1)
	}()
	for before := written(own.Peers); ; before = await(own.Peers, before) {
		var wanted []peer
		if err := read(own.Peers, &wanted); err != nil && !errors.Is(err, fs.ErrNotExist) {
			fmt.Fprintf(os.Stderr, "carry-packets: %v\n", err)
			continue
		}
		if err := peers.set(wanted, ""); err != nil {
			return err
		}
		heard, err := peers.heard()
		if err != nil {
			return err
		}
		for number := range wanted {
			wanted[number].Endpoint = heard[wanted[number].Public]
		}
		current.renew(wanted)
	}
}

// await returns once the file is another than the one of that time, or after a while, and its time.
func await(file string, before time.Time) time.Time {
	for end := time.Now().Add(look); time.Now().Before(end); time.Sleep(glance) {
		if now := written(file); !now.Equal(before) {
			return now
		}
	}
	return before
}

// written is when a file was, which others replace as a whole; the zero time if there is none.
func written(file string) time.Time {
	found, err := os.Stat(file)
	if err != nil {
		return time.Time{}
	}
	return found.ModTime()
}

func (l *list) renew(wanted []peer) {
	l.Lock()
	defer l.Unlock()
	if slices.EqualFunc(l.Peers, wanted, same) {
		return
	}
	l.answer = answer{l.Number + 1, wanted}
	close(l.other)
	l.other = make(chan struct{})
}

// ServeHTTP answers who there is, as soon as it is another list than the one that the asking has.
func (l *list) ServeHTTP(writer http.ResponseWriter, request *http.Request) {
	last, _ := strconv.Atoi(request.URL.Query().Get("last"))
	l.Lock()
	other, number := l.other, l.Number
	l.Unlock()
	if number == last {
		select {
		case <-other:
		case <-time.After(hold):
		case <-request.Context().Done():
			return
		}
	}
	l.Lock()
	text, _ := json.Marshal(l.answer)
	l.Unlock()
	_, _ = writer.Write(text)
}

func askOn(own node, peers *peers) error {
	client := http.Client{Timeout: 2 * hold}
	last := 0
	for {
		found, err := ask(client, own.Ask, last)
		if err != nil {
			time.Sleep(look) // the control node is away for now
			last = 0         // and another may be there then
			continue
		}
		if found.Number != last {
			if err := peers.set(found.Peers, ""); err != nil {
				return err
			}
			last = found.Number
		}
	}
}

func ask(client http.Client, address string, last int) (found answer, err error) {
	reply, err := client.Get(fmt.Sprintf("http://%s/?last=%d", address, last))
	if err != nil {
		return found, err
	}
	defer reply.Body.Close()
	return found, json.NewDecoder(reply.Body).Decode(&found)
}

// bind is one UDP socket that somebody else has made, on one address alone.
type bind struct {
	udp   *net.UDPConn
	batch *ipv4.PacketConn
	over  chan struct{}
}

func (b *bind) Open(uint16) ([]conn.ReceiveFunc, uint16, error) {
	if b.over != nil {
		return nil, 0, conn.ErrBindAlreadyOpen
	}
	b.over = make(chan struct{})
	b.batch = ipv4.NewPacketConn(b.udp)
	if err := b.udp.SetReadDeadline(time.Time{}); err != nil {
		return nil, 0, err
	}
	messages := make([]ipv4.Message, conn.IdealBatchSize)
	receive := func(into [][]byte, sizes []int, from []conn.Endpoint) (int, error) {
		for number := range into {
			messages[number].Buffers = [][]byte{into[number]}
		}
		count, err := b.batch.ReadBatch(messages[:len(into)], 0)
		if err != nil {
			select {
			case <-b.over:
				return 0, net.ErrClosed
			default:
				return 0, err
			}
		}
		for number := range count {
			sizes[number] = messages[number].N
			address := messages[number].Addr.(*net.UDPAddr).AddrPort()
			from[number] = &endpoint{netip.AddrPortFrom(address.Addr().Unmap(), address.Port())}
		}
		return count, nil
	}
	port := b.udp.LocalAddr().(*net.UDPAddr).AddrPort().Port()
	return []conn.ReceiveFunc{receive}, port, nil
}

// Close ends the reading; the socket stays, since nobody here could make another.
func (b *bind) Close() error {
	if b.over == nil {
		return nil
	}
	close(b.over)
	b.over = nil
	return b.udp.SetReadDeadline(time.Unix(1, 0))
}

func (b *bind) SetMark(uint32) error { return nil }

func (b *bind) BatchSize() int { return conn.IdealBatchSize }

func (b *bind) Send(packets [][]byte, to conn.Endpoint) error {
	address := net.UDPAddrFromAddrPort(to.(*endpoint).AddrPort)
	messages := make([]ipv4.Message, len(packets))
	for number, packet := range packets {
		messages[number] = ipv4.Message{Buffers: [][]byte{packet}, Addr: address}
	}
	for len(messages) > 0 {
		count, err := b.batch.WriteBatch(messages, 0)
		if err != nil {
			return err
		}
		messages = messages[count:]
	}
	return nil
}

func (b *bind) ParseEndpoint(text string) (conn.Endpoint, error) {
	address, err := netip.ParseAddrPort(text)
	return &endpoint{address}, err
}

// endpoint is where a peer's socket is.
type endpoint struct{ netip.AddrPort }

func (e *endpoint) ClearSrc()           {}
func (e *endpoint) SrcToString() string { return "" }
func (e *endpoint) SrcIP() netip.Addr   { return netip.Addr{} }
func (e *endpoint) DstToString() string { return e.String() }
func (e *endpoint) DstIP() netip.Addr   { return e.Addr() }
func (e *endpoint) DstToBytes() []byte {
	text, _ := e.MarshalBinary()
	return text
}
