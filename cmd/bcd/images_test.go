package main

import (
	"encoding/pem"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestImageClient: an image server elsewhere is trusted when its authority is
// in image-roots.pem, and only then.
func TestImageClient(t *testing.T) {
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	server.Config.ErrorLog = log.New(io.Discard, "", 0) // a refused handshake is meant here
	server.StartTLS()
	defer server.Close()
	path := filepath.Join(t.TempDir(), imageRootsFile)
	get := func() error {
		t.Helper()
		client, err := imageClient(path)
		if err != nil {
			t.Fatal(err)
		}
		answer, err := client.Get(server.URL)
		if err == nil {
			answer.Body.Close()
		}
		return err
	}
	if err := get(); err == nil || !strings.Contains(err.Error(), "unknown authority") {
		t.Errorf("without a file: %v", err)
	}
	block := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	if err := os.WriteFile(path, block, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := get(); err != nil {
		t.Errorf("with its authority: %v", err)
	}
	if err := os.WriteFile(path, []byte("nothing"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := imageClient(path); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("a file without certificates: %v", err)
	}
}
