package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
)

// unpackPeers puts the servers that ours are measured beside into a folder.
// They are not installed: Debian starts such services when they are.
func unpackPeers(ctx context.Context, dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	download := exec.CommandContext(ctx, "apt-get", "-q", "-o", "APT::Sandbox::User=root", "download", "nginx", "tftpd-hpa", "libwrap0")
	download.Dir = dir
	if out, err := download.CombinedOutput(); err != nil {
		return fmt.Errorf("apt-get download nginx tftpd-hpa libwrap0: %w: %s; run apt-get update", err, out)
	}
	packages, err := filepath.Glob(filepath.Join(dir, "*.deb"))
	if err != nil {
		return err
	}
	for _, p := range packages {
		if out, err := exec.CommandContext(ctx, "dpkg-deb", "-x", p, dir).CombinedOutput(); err != nil {
			return fmt.Errorf("unpack %s: %w: %s", p, err, out)
		}
	}
	return nil
}

// peerCommand is how a server is started in its namespace.
type peerCommand struct {
	protocol    string
	arguments   []string
	environment []string
}

func (b *bench) command(server string) *peerCommand {
	switch server {
	case "dnsmasq":
		return &peerCommand{"tftp", []string{"dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--port=0", "--enable-tftp",
			"--tftp-root=" + b.root, "--interface=boot0", "--bind-interfaces", "--pid-file=" + filepath.Join(b.dir, "dnsmasq.pid"), "--user=root", "--tftp-max=1000"}, nil}
	case "tftpd-hpa":
		return &peerCommand{"tftp", []string{filepath.Join(b.peers, "usr/sbin/in.tftpd"), "-L", "-4", "-u", "root", "--secure", "-a", serverAddr + ":69", b.root},
			[]string{"LD_LIBRARY_PATH=" + filepath.Join(b.peers, "usr/lib", multiarch())}}
	case "nginx":
		return &peerCommand{"http", []string{filepath.Join(b.peers, "usr/sbin/nginx"), "-p", b.dir, "-e", filepath.Join(b.dir, "nginx.err"), "-c", b.nginxConfig()}, nil}
	}
	return &peerCommand{server, []string{b.self, "-serve", server, "-dir", b.root}, nil}
}

// multiarch is the folder of Debian's libraries, wherever libwrap's one is.
func multiarch() string {
	if out, err := exec.Command("dpkg-architecture", "-qDEB_HOST_MULTIARCH").Output(); err == nil && len(out) > 1 {
		return string(out[:len(out)-1])
	}
	return "x86_64-linux-gnu"
}

// nginxConfig is what its own documentation advises for static files.
func (b *bench) nginxConfig() string {
	path := filepath.Join(b.dir, "nginx.conf")
	config := fmt.Sprintf(`daemon off;
user root;
worker_processes auto;
pid %[1]s/nginx.pid;
events { worker_connections 1024; }
http {
	access_log off;
	sendfile on;
	tcp_nopush on;
	client_body_temp_path %[1]s/body;
	proxy_temp_path %[1]s/proxy;
	fastcgi_temp_path %[1]s/fastcgi;
	uwsgi_temp_path %[1]s/uwsgi;
	scgi_temp_path %[1]s/scgi;
	server { listen %[2]s:80; root %[3]s; }
}
`, b.dir, serverAddr, b.root)
	if err := os.WriteFile(path, []byte(config), 0o644); err != nil {
		// nginx will say that there is none.
		fmt.Fprintln(os.Stderr, "benchnetboot:", err)
	}
	return path
}
