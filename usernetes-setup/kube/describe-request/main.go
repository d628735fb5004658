// SPDX-License-Identifier: LGPL-3.0-or-later

// Command describe-request says what a certificate signing request asks for: PEM on standard
// input, JSON on standard output. The CSR approver decides by it.
//
// It reads with the same standard packages as the API server's signer, so the two cannot take one
// request for two different things. Invariant: what it prints is the whole request. Whatever it
// cannot name in full (text around the PEM, other bytes after a value, an attribute with several
// values, a signature that does not fit) is an error: a line on standard error, and exit code 1.
//
//	{"subject": [[["2.5.4.10", "system:nodes"]], [["2.5.4.3", "system:node:n1"]]],
//	 "attributes": ["1.2.840.113549.1.9.14"], "extensions": ["2.5.29.17"],
//	 "names": [["DNS", "n1"], ["IP", "192.0.2.1"]]}
//
// The subject is a list of relative distinguished names, each a list of types and texts.
package main

import (
	"bytes"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/asn1"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
)

var (
	extensionRequest = asn1.ObjectIdentifier{1, 2, 840, 113549, 1, 9, 14}
	alternativeNames = asn1.ObjectIdentifier{2, 5, 29, 17}
	// What RFC 5280 calls the kinds of a general name, by tag.
	kinds = []string{"otherName", "email", "DNS", "x400Address", "directoryName", "ediPartyName",
		"URI", "IP", "registeredID"}
)

type description struct {
	Subject    [][][2]string `json:"subject"`
	Attributes []string      `json:"attributes"`
	Extensions []string      `json:"extensions"`
	Names      [][2]string   `json:"names"`
}

// The part of a request that is signed, as RFC 2986 defines it. crypto/x509 skips attributes that
// it does not know; here each one is seen.
type requestInfo struct {
	Version    int
	Subject    asn1.RawValue
	PublicKey  asn1.RawValue
	Attributes []attribute `asn1:"tag:0,set"`
}

type attribute struct {
	Type   asn1.ObjectIdentifier
	Values []asn1.RawValue `asn1:"set"`
}

// A part of the subject; that it is a set, encoding/asn1 sees by the ending of the type's name.
type partSET []struct {
	Type  asn1.ObjectIdentifier
	Value asn1.RawValue
}

// unmarshal reads a value that holds no more than what was read: encoding/asn1 passes over what
// follows the last field, so the value is written again and must be the same.
func unmarshal[T any](data []byte, what string) (into T, err error) {
	var again []byte
	if _, err = asn1.Unmarshal(data, &into); err == nil {
		again, err = asn1.Marshal(into)
	}
	if err == nil && !bytes.Equal(again, data) {
		err = errors.New("holds more than can be read")
	}
	if err != nil {
		err = fmt.Errorf("%s: %w", what, err)
	}
	return into, err
}

func describe(text []byte) (*description, error) {
	block, rest := pem.Decode(text)
	if block == nil || block.Type != "CERTIFICATE REQUEST" || len(block.Headers) > 0 ||
		len(bytes.TrimSpace(rest)) > 0 || !bytes.HasPrefix(text, []byte("-----BEGIN ")) {
		return nil, errors.New("not one PEM block of a certificate request, and nothing else")
	}
	request, err := x509.ParseCertificateRequest(block.Bytes)
	if err != nil {
		return nil, err
	}
	if err := request.CheckSignature(); err != nil {
		return nil, err
	}
	found := &description{Subject: [][][2]string{}, Attributes: []string{}, Extensions: []string{},
		Names: [][2]string{}}
	if err := found.readSubject(request.RawSubject); err != nil {
		return nil, err
	}
	if err := found.readAttributes(request.RawTBSCertificateRequest); err != nil {
		return nil, err
	}
	return found, nil
}

func (found *description) readSubject(data []byte) error {
	subject, err := unmarshal[[]partSET](data, "subject")
	if err != nil {
		return err
	}
	for _, part := range subject {
		pairs := [][2]string{}
		for _, entry := range part {
			var text string
			if _, err := asn1.Unmarshal(entry.Value.FullBytes, &text); err != nil {
				return fmt.Errorf("subject: %s is no text", entry.Type)
			}
			pairs = append(pairs, [2]string{entry.Type.String(), text})
		}
		found.Subject = append(found.Subject, pairs)
	}
	return nil
}

func (found *description) readAttributes(data []byte) error {
	info, err := unmarshal[requestInfo](data, "request")
	if err != nil {
		return err
	}
	for _, entry := range info.Attributes {
		found.Attributes = append(found.Attributes, entry.Type.String())
		if len(entry.Values) != 1 {
			return fmt.Errorf("attribute %s: %d values", entry.Type, len(entry.Values))
		}
		if !entry.Type.Equal(extensionRequest) {
			continue
		}
		extensions, err := unmarshal[[]pkix.Extension](entry.Values[0].FullBytes, "extensions")
		if err != nil {
			return err
		}
		for _, extension := range extensions {
			found.Extensions = append(found.Extensions, extension.Id.String())
			if extension.Id.Equal(alternativeNames) {
				if err := found.readNames(extension.Value); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (found *description) readNames(data []byte) error {
	names, err := unmarshal[[]asn1.RawValue](data, "alternative names")
	if err != nil {
		return err
	}
	for _, name := range names {
		if name.Class != asn1.ClassContextSpecific || name.Tag >= len(kinds) {
			return fmt.Errorf("alternative names: no kind has tag %d", name.Tag)
		}
		kind, value := kinds[name.Tag], string(name.Bytes)
		switch kind {
		case "DNS", "email", "URI": // each one text
		case "IP":
			address, ok := netip.AddrFromSlice(name.Bytes)
			if !ok {
				return fmt.Errorf("alternative names: an address of %d bytes", len(name.Bytes))
			}
			value = address.String()
		default:
			value = fmt.Sprintf("%x", name.Bytes)
		}
		found.Names = append(found.Names, [2]string{kind, value})
	}
	return nil
}

func main() {
	text, err := io.ReadAll(os.Stdin)
	if err == nil {
		var found *description
		if found, err = describe(text); err == nil {
			err = json.NewEncoder(os.Stdout).Encode(found)
		}
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "describe-request: %v\n", err)
		os.Exit(1)
	}
}
