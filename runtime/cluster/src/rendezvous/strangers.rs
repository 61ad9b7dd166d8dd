//! Reports of those that the rendezvous turns away.

use std::collections::BTreeSet;
use std::net::IpAddr;

use crate::handshake::TurnedAway;

/// Reports in all: a scan of the port comes from many addresses.
const REPORTS_MAX: usize = 16;

/// Reports each stranger once for its address and reason. A report has nothing that the stranger has sent.
pub struct Strangers<'r> {
    report: &'r mut dyn FnMut(&str),
    known: BTreeSet<(IpAddr, String)>,
}

impl<'r> Strangers<'r> {
    /// No stranger yet.
    pub fn new(report: &'r mut dyn FnMut(&str)) -> Strangers<'r> {
        Strangers { report, known: BTreeSet::new() }
    }

    /// Reports those that are new.
    pub fn report(&mut self, turned_away: &[TurnedAway]) {
        for TurnedAway { address, reason } in turned_away {
            if self.known.len() > REPORTS_MAX || !self.known.insert((address.ip(), reason.clone()))
            {
                continue;
            }
            match self.known.len() {
                ..=REPORTS_MAX => {
                    (self.report)(&format!("the rendezvous turned away {address}: {reason}"));
                }
                _ => (self.report)("the rendezvous turned away others, which are not reported"),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::*;

    #[test]
    fn a_scan_of_the_port_has_few_reports() {
        let mut reports = vec![];
        let mut report = |text: &str| reports.push(text.to_owned());
        let mut strangers = Strangers::new(&mut report);
        let stranger = |host: u8, port: u16| TurnedAway {
            address: SocketAddr::from(([10, 0, 0, host], port)),
            reason: "it is another program".into(),
        };
        for host in 0..100 {
            strangers.report(&[stranger(host, 1), stranger(host, 2)]);
        }
        assert_eq!(reports.len(), REPORTS_MAX + 1, "{reports:?}");
        assert_eq!(reports[1], "the rendezvous turned away 10.0.0.1:1: it is another program");
        assert!(reports[REPORTS_MAX].ends_with("which are not reported"), "{reports:?}");
    }
}
